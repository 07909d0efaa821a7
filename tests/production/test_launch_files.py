"""Launch files name options that exist, resume automatically, and fit their programs' schemas."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.command_line import ROOT
from tests.helpers.parsed_commands import refused
from tests.peers.environment import UnavailableError, ask

LAUNCH = ROOT / "recipes" / "launch"
YAML = sorted([*LAUNCH.glob("*.yaml"), *LAUNCH.glob("*.yml")])
START = re.compile(r"(?:^|\s)(?:peftkit|-m peftkit_cli)\s+(.*)")


def content_of(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def strings(value: Any) -> Iterator[str]:
    """Yield the command lines in a parsed file: texts, and lists of words as one line."""
    if isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        yield from (item for part in value for item in strings(part))
        if value and all(isinstance(item, str) for item in value):
            yield shlex.join(value)
    elif isinstance(value, str):
        yield from value.splitlines()


def commands(path: Path) -> list[str]:
    """Return the arguments of each call of peftkit in a launch file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        lines = text.replace("\\\n", " ").splitlines()
        lines = [line for line in lines if not line.startswith("#")]
    else:
        content = yaml.safe_load(text)
        lines = [line.replace("\n", " ") for line in strings(content)]
        lines += [f"peftkit {shlex.join(words)}" for words in of_our_image(content)]
    found = (START.search(line) for line in lines if "install" not in line)
    return [match[1].strip("'\"") for match in found if match]


def of_our_image(value: Any) -> Iterator[list[str]]:
    """Yield the arguments of containers of our image, whose entry point is peftkit."""
    if isinstance(value, dict):
        is_ours = str(value.get("image", "")).startswith("peftkit:")
        words = value.get("args", value.get("command"))
        has_shell = "args" in value and "command" in value
        if is_ours and not has_shell and words[0] != "torchrun":
            yield words
        for item in value.values():
            yield from of_our_image(item)
    elif isinstance(value, list):
        for item in value:
            yield from of_our_image(item)


@pytest.mark.parametrize("path", [*YAML, LAUNCH / "slurm.sh"], ids=lambda path: path.name)
def test_a_launch_file_calls_peftkit_with_options_that_exist(path):
    called = commands(path)
    assert called
    for arguments in called:
        assert refused(arguments) == "", arguments
        if " train " in f" {arguments}" and "serve" not in arguments:
            assert "--resume auto" in arguments


def test_the_guide_names_each_launch_file():
    page = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    for path in [*YAML, LAUNCH / "slurm.sh", LAUNCH / "ray_train.py"]:
        assert f"recipes/launch/{path.name}" in page


def test_kubernetes_restarts_preempted_pods_and_not_wrong_recipes():
    spec = content_of("kubernetes-job.yaml")["spec"]
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"]["values"] == [2]
    assert rules["Ignore"]["onPodConditions"][0]["type"] == "DisruptionTarget"
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 120
    (container,) = pod["containers"]
    assert rules["FailJob"]["onExitCodes"]["containerName"] == container["name"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_machines_of_a_jobset_find_the_first_one():
    content = content_of("kubernetes-jobset.yaml")
    spec, name = content["spec"], content["metadata"]["name"]
    (job,) = spec["replicatedJobs"]
    inner = job["template"]["spec"]
    assert inner["completionMode"] == "Indexed"
    (container,) = inner["template"]["spec"]["containers"]
    command = container["args"][0]
    assert f"--nnodes {inner['parallelism']} " in command
    assert inner["parallelism"] == inner["completions"]
    host = f"{name}-{job['name']}-0-0.{spec['network']['subdomain']}"
    assert f"--master-addr {host} " in command
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} " in command


FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$(basename "$0") $1" in
    "scontrol show") echo node7; echo node8;;
    srun*) if [ -n "$FINISHES" ]; then mkdir -p "$OUT"; touch "$OUT/finished.json"; fi; exit $CODE;;
esac
"""


@pytest.mark.parametrize(
    ("code", "finishes", "requeues"), [(143, "", True), (0, "1", False), (2, "", False)]
)
def test_the_slurm_script_requeues_a_job_that_is_not_finished(code, finishes, requeues, tmp_path):
    log = tmp_path / "calls.log"
    for name in ("srun", "scontrol"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE.format(log=log))
        path.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "58",
        "SLURM_NNODES": "2",
        "CODE": str(code),
        "FINISHES": finishes,
        "OUT": str(tmp_path / "out"),
    }
    command = ["bash", str(LAUNCH / "slurm.sh"), "recipe.yaml", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    calls = log.read_text().splitlines()
    assert "--rdzv-endpoint node7:29500" in calls[1]
    assert f"train recipe.yaml --out {tmp_path}/out --resume auto" in calls[1]
    assert ("scontrol requeue 58" in calls) is requeues


def test_the_slurm_script_asks_for_a_signal_and_a_requeue():
    options = re.findall(
        r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (LAUNCH / "slurm.sh").read_text(), re.M
    )
    assert {"requeue": "", "signal": "TERM@120", "nodes": "2"}.items() <= dict(options).items()


@pytest.mark.slow
def test_the_programs_clients_accept_the_files():
    files = [*YAML, *(ROOT / ".github" / "workflows").glob("*.yml")]
    try:
        problems = ask("launchers", "launchers", {path.name: str(path) for path in files})
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert problems == dict.fromkeys((path.name for path in files), "")
