"""Validates launch files with their programs' clients: {"name": path} -> {"name": problem}."""

import json
import sys
from pathlib import Path


def difference(given, known, where=""):
    """Return the first field of `given` that `known` lacks or has otherwise; "": none."""
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(known, dict) or name not in known:
                return f"unknown field {where}.{name}"
            if problem := difference(value, known[name], f"{where}.{name}"):
                return problem
        return ""
    if isinstance(given, list):
        pairs = zip(given, known, strict=True)
        return next(filter(None, (difference(*pair, where) for pair in pairs)), "")
    return "" if str(given) == str(known) else f"{where} is {given!r}, not {known!r}"


def job(path):
    import yaml
    from kubernetes.client import ApiClient

    client, content = ApiClient(), yaml.safe_load(Path(path).read_text())
    read = client._ApiClient__deserialize(content, "V1Job")  # the client reads responses by it
    return difference(content, client.sanitize_for_serialization(read))


def of_kubeflow(path, kind):
    import kubeflow_trainer_api.models as models
    import yaml

    content = yaml.safe_load(Path(path).read_text())
    return difference(content, getattr(models, kind).from_dict(content).to_dict())


def skypilot(path):
    import sky

    task = sky.Task.from_yaml(path)
    return "" if all(resources.use_spot for resources in task.resources) else "no spot machine"


def dstack(path):
    import yaml
    from dstack._internal.core.models.configurations import parse_run_configuration

    parse_run_configuration(yaml.safe_load(Path(path).read_text()))
    return ""


def by_schema(path, name):
    from importlib.util import find_spec

    import jsonschema
    import yaml

    (package,) = find_spec("check_jsonschema").submodule_search_locations
    folder = Path(package) / "builtin_schemas" / "vendor"
    content = yaml.safe_load(Path(path).read_text())
    content = {"on" if key is True else key: value for key, value in content.items()}
    jsonschema.validate(content, json.loads((folder / name).read_text()))
    return ""


CHECKS = {
    "kubernetes-job.yaml": job,
    "kubernetes-jobset.yaml": lambda path: of_kubeflow(path, "JobsetV1alpha2JobSet"),
    "kubeflow-trainjob.yaml": lambda path: of_kubeflow(path, "TrainerV1alpha1TrainJob"),
    "skypilot.yaml": skypilot,
    "dstack.dstack.yml": dstack,
    "compose.yaml": lambda path: by_schema(path, "compose-spec.json"),
    "release.yml": lambda path: by_schema(path, "github-workflows.json"),
    "ci.yml": lambda path: by_schema(path, "github-workflows.json"),
}


def problem(name, path):
    try:
        return CHECKS[name](path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


print(json.dumps({name: problem(name, path) for name, path in json.load(sys.stdin).items()}))
