"""Imports go down the layers, a third-party package has its importers, and no cycle closes.

Imports are parsed, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        *("errors", "events", "figures", "settings", "defaults"),
        *("config/", "files/", "execution/", "kernels/"),
    ),
    ("model/", "quant/", "data/", "forward/"),
    ("base/", "methods/", "adapter", "tasks/", "formats/", "inference/", "evaluation/"),
    ("train/", "planning/", "proof/", "recipe", "record", "run"),
    ("merging/", "report/", "__init__"),
    ("server/", "cli/start/"),
    ("studio/",),
    ("cli/",),
)
"""Bottom first: peftkit/<name>.py, or a package `x/`. Modules of a layer may import each other.
The applications in cli/ stand above peftkit."""

APPLICATIONS = {"peftkit_server": "server", "peftkit_studio": "studio", "peftkit_cli": "cli"}
"""The packages in cli/, with their names in LAYERS and IMPORTERS."""

PUBLIC = """
    adapter defaults errors events figures recipe settings base/load base/locate base/new_tokens
    base/pretrained base/purpose base/skeleton base/store base/stored config/schema
    config/strict_yaml data/chat data/chat_template data/examples data/format data/generation
    data/media/files data/messages data/pack data/preferences data/prompts data/readers
    data/records data/style evaluation/drift evaluation/evaluate evaluation/make_rows
    evaluation/predict execution/children execution/environment execution/out_of_memory
    execution/plan execution/rng execution/signals files/disk files/strict_json files/tensors
    formats/find_adapter formats/folders formats/gguf/requantize formats/guard
    formats/open_adapter formats/peft/folder formats/peft/load formats/peft/low_rank
    formats/serving forward/attention forward/blocks forward/compiler forward/fused forward/loss
    forward/probes forward/row_lengths inference/bank inference/call_formats inference/calls
    inference/engine inference/generate inference/open_engine inference/sampling
    kernels/cross_entropy kernels/device merging/advice merging/fold merging/prompt_format
    merging/quantized methods/prefix methods/table model/blocks model/modes model/places
    model/roles model/targets planning/memory planning/plan planning/resolve report/chart
    report/history report/page tasks/batches tasks/distill/rows tasks/media/media_text
    tasks/rewards/graders tasks/rewards/grading tasks/tokens tasks/user_code
    train/checkpoint_files train/fitting train/metrics train/optim train/resume train/start
    train/trackers
"""
"""Modules of peftkit from which applications import names that peftkit does not export."""

MAX_PUBLIC = 99
"""Maximum number of modules in PUBLIC. A commit may only lower it."""

ONE_WAY = (("inference/", "tasks/"), ("server/", "cli/"), ("cli/start/", "server/"))
"""Packages of one layer: the first never imports the second."""

IMPORTERS: Mapping[str, tuple[str, ...]] = {
    "torch": ("",),
    "bitsandbytes": ("quant/", "train/optim"),
    # comes with transformers: a checkpoint holds its generator's state, gguf reads arrays of it
    "numpy": ("execution/rng", "base/gguf_file", "base/gguf_reader"),
    "triton": ("kernels/",),
    "accelerate": ("execution/world", "train/trackers"),
    "mlflow": ("train/trackers",),  # a tracker that users install; imported when called
    "datasets": ("data/readers",),
    "fsspec": ("files/remote",),  # datasets requires it
    "pyarrow": ("data/rows/",),  # datasets brings it; imported when rows are encoded
    "filelock": ("files/disk",),  # likewise
    "transformers": ("base/", "forward/", "tasks/", "methods/prefix", "inference/"),
    # the optional extra; imported when called
    "gguf": ("formats/gguf/", "base/gguf_file", "base/gguf_reader"),
    "tokenizers": ("base/gguf_reader",),  # comes with transformers: the cached tokenizer of a file
    "huggingface_hub": ("formats/hub", "formats/card"),
    "tqdm": ("base/pretrained",),  # what the hub tells of a download by; transformers brings it
    "safetensors": ("files/tensors", "merging/", "base/store"),
    "pydantic_core": ("config/",),
    "pydantic": (
        "settings",
        "config/",
        "methods/",
        "tasks/",
        "recipe",
        "report/history",
        "server/clients/",
        "server/predictions/app",
        "server/requests",
        "server/tool_fields",
        "server/tokens",
        "server/tuning/",
        "server/tinker/bodies",
        "server/validation",
    ),
    "yaml": ("config/", "cli/import_recipe", "studio/edits"),  # files of other programs; edits
    "PIL": ("data/media/",),  # the optional extra `images`; imported when called
    "av": ("data/media/",),  # the optional extra `video`; imported when called
    "soundfile": ("data/media/",),  # the optional extra `audio`; imported when called
    "soxr": ("data/media/",),
    "jiwer": ("tasks/metrics",),
    # the optional extra `serve`, with uvicorn; imported when called
    "starlette": ("server/", "studio/"),
    "uvicorn": ("server/server", "studio/server"),
    "prometheus_client": ("server/metrics",),  # the optional extra `metrics`
    "google": ("server/tinker/wire",),  # protobuf: the optional extra `train-api`
    "llguidance": ("server/grammars",),  # the optional extra `json`; imported when called
    "lm_eval": ("cli/harness",),  # the optional extra `lm-eval`; imported when called
    "typer": ("cli/",),
    "rich": ("cli/",),
}
"""Which files may import a third-party package; one that is not named here is imported nowhere."""

CLOSURES = {"peftkit.recipe": 20, "peftkit.run": 106}
"""Maximum number of modules that an import of these modules loads."""

WITHOUT_TORCH = (
    "peftkit_cli.app",
    "peftkit.config.schema",
    "peftkit.errors",
    "peftkit.events",
    "peftkit.model.roles",
    "peftkit.report.page",
    "peftkit_studio.app",
)


class Import(NamedTuple):
    """One import: `importer` and `target` are dotted modules, `names` whatever comes from it.

    Attributes:
        is_eager: Whether it runs when the importer is imported.
    """

    where: str
    importer: str
    target: str
    names: tuple[str, ...]
    is_eager: bool
    is_relative: bool = False


@cache
def modules() -> dict[str, str]:
    """Return the source of every module, by dotted name; packages end in `.__init__`."""
    found = {}
    for top, package in ((ROOT, "peftkit"), *((ROOT / "cli", name) for name in APPLICATIONS)):
        for path in sorted((top / package).rglob("*.py")):
            name = ".".join(path.relative_to(top).with_suffix("").parts)
            found[name] = path.read_text(encoding="utf-8")
    return found


def short_name(module: str) -> str:
    """Return a module's name as LAYERS and IMPORTERS write it: `data/load`, `cli/app`, `config`."""
    package, *parts = module.split(".")
    return "/".join([APPLICATIONS[package], *parts] if package in APPLICATIONS else parts)


def fits(name: str, pattern: str) -> bool:
    return name == pattern or not pattern or (pattern.endswith("/") and name.startswith(pattern))


def layer(module: str) -> int | None:
    return next(
        (n for n, parts in enumerate(LAYERS) if any(fits(short_name(module), p) for p in parts)),
        None,
    )


def imports(sources: Mapping[str, str]) -> Iterator[Import]:
    """Parse every import, also importlib.import_module("literal")."""
    for module, source in sources.items():
        yield from _imports_of(module, source)


@cache
def _imports_of(module: str, source: str) -> tuple[Import, ...]:
    prefix = "cli/" if module.split(".")[0] in APPLICATIONS else ""
    file, found = prefix + module.replace(".", "/") + ".py", []
    for top in ast.parse(source).body:
        is_eager = isinstance(top, ast.Import | ast.ImportFrom) or (
            isinstance(top, ast.If) and "TYPE_CHECKING" not in ast.unparse(top.test)
        )
        for node in ast.walk(top):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                found += [Import(where, module, each.name, (), is_eager) for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = tuple(alias.name for alias in node.names)
                target = node.module or ""
                found.append(Import(where, module, target, names, is_eager, node.level > 0))
            elif isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                first = node.args[0]
                if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
                    found.append(Import(where, module, str(first.value), (), is_eager))
    return tuple(found)


def breaches(sources: Mapping[str, str]) -> list[str]:
    """Return every breach of the rules, each with file, line and rule."""
    told = [
        f"{module}: is in no layer; add it to LAYERS"
        for module in sources
        if layer(module) is None and not module.endswith(".__init__")
    ]
    edges: dict[str, dict[str, str]] = {module: {} for module in sources}
    for found in imports(sources):
        if found.is_relative:
            told.append(f"{found.where}: relative import; name the module in full")
        elif found.target.split(".")[0] in {"peftkit", *APPLICATIONS}:
            for target in _own_targets(found, sources):
                told += _climbs(found, target)
                edges[found.importer].setdefault(target, found.where)
        else:
            told += _not_an_importer(found)
    return told + _cycles(edges)


def _own_targets(found: Import, sources: Mapping[str, str]) -> list[str]:
    """Return the modules that an import of ours reaches; a package stands as its `__init__`."""
    modules = []
    for name in found.names or ("",):
        deeper = f"{found.target}.{name}"
        options = (deeper, f"{deeper}.__init__", found.target, f"{found.target}.__init__")
        modules += [next((option for option in options if option in sources), found.target)]
    return list(dict.fromkeys(modules))


def _climbs(found: Import, target: str) -> list[str]:
    importer = found.importer
    if target.endswith(".__init__"):
        return [f"{found.where}: imports {target}; import from the module that defines the name"]
    mine, other = layer(importer), layer(target)
    if importer.endswith(".__init__") and importer != "peftkit.__init__":
        return [f"{found.where}: a folder's __init__ imports nothing"]
    if other is None:
        return [f"{found.where}: imports {target}, which is no module of peftkit"]
    for lower, upper in ONE_WAY:
        if fits(short_name(importer), lower) and fits(short_name(target), upper):
            return [f"{found.where}: import of {target}; {lower} imports nothing of {upper}"]
    if mine is not None and other > mine:
        return [f"{found.where}: import of {target} climbs (layer {mine} to {other}); go down only"]
    return []


def _not_an_importer(found: Import) -> list[str]:
    package = found.target.split(".")[0]
    if package in sys.stdlib_module_names:
        return []
    importers = IMPORTERS.get(package, ())
    if any(fits(short_name(found.importer), name) for name in importers):
        return []
    allowed = ", ".join(importers) or "nowhere"
    return [f"{found.where}: imports {package} where it may not be ({allowed})"]


def _cycles(edges: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return one line for each import that closes a cycle."""
    told, done = [], set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        for target, where in edges.get(module, {}).items():
            if target in path:
                cycle = " -> ".join((*path[path.index(target) :], target))
                told.append(f"{where}: closes the cycle {cycle}")
            elif target not in done:
                visit(target, (*path, target))
        done.add(module)

    for module in edges:
        if module not in done:
            visit(module, (module,))
    return told


def test_imports_keep_the_rules():
    told = breaches(modules())
    assert not told, "\n".join(told)


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ({"peftkit.errors": "def f():\n    import peftkit.recipe"}, "errors.py:2: import of peft"),
        (
            {"peftkit.config.schema": "from peftkit.model.targets import Site"},
            "config/schema.py:1: import of peftkit.model.targets climbs",
        ),
        (
            {
                "peftkit.train.loop": "from peftkit.train.optim import x",
                "peftkit.train.optim": "from peftkit.train.loop import y",
            },
            "closes the cycle peftkit.train.loop -> peftkit.train.optim -> peftkit.train.loop",
        ),
        (
            {"peftkit_cli.app": "from peftkit import load_base"},
            "app.py:1: imports peftkit.__init__;",
        ),
        (
            {"peftkit.recipe": "from peftkit.data import Row"},
            "imports peftkit.data.__init__; import",
        ),
        ({"peftkit.data.__init__": "from peftkit.data.load import x"}, "__init__ imports nothing"),
        (
            {
                "peftkit.inference.engine": "from peftkit.tasks.tokens import x",
                "peftkit.tasks.tokens": "",
            },
            "engine.py:1: import of peftkit.tasks.tokens; inference/ imports nothing of tasks/",
        ),
        (
            {"peftkit.run": "import peftkit_server.app", "peftkit_server.app": ""},
            "peftkit/run.py:1: import of peftkit_server.app climbs",
        ),
        (
            {"peftkit_server.app": "import peftkit_cli.start.draft", "peftkit_cli.start.draft": ""},
            "cli/peftkit_server/app.py:1: import of peftkit_cli.start.draft; server/ imports noth",
        ),
        (
            {"peftkit_studio.app": "import peftkit_cli.app", "peftkit_cli.app": ""},
            "cli/peftkit_studio/app.py:1: import of peftkit_cli.app climbs",
        ),
        ({"peftkit.data.load": "from .pack import x"}, "load.py:1: relative import"),
        (
            {"peftkit.recipe": "from peftkit.nowhere import x"},
            "imports peftkit.nowhere, which is no",
        ),
        ({"peftkit.nowhere": ""}, "peftkit.nowhere: is in no layer"),
        ({"peftkit.train.loop": "from bitsandbytes import optim"}, "not be (quant/, train/optim)"),
        ({"peftkit.recipe": "import rich.table"}, "peftkit/recipe.py:1: imports rich where it may"),
        (
            {"peftkit.recipe": 'import_module("peft.tuners")'},
            "imports peft where it may not be (nowhere)",
        ),
    ],
)
def test_each_rule_names_file_and_line(sources, told):
    packages = {"peftkit.__init__": "", "peftkit.data.__init__": "", "peftkit_cli.__init__": ""}
    modules = dict.fromkeys(
        ("peftkit.model.targets", "peftkit.methods.lora", "peftkit.data.load"), ""
    )
    (breach,) = breaches(packages | modules | sources)
    assert told in breach


def test_what_the_rules_allow_is_no_breach():
    assert not breaches(
        {
            "peftkit.errors": "from __future__ import annotations\nimport os.path",
            "peftkit.quant.layers": "import bitsandbytes.functional as F\nimport torch",
            "peftkit.formats.peft.folder": "from peftkit.formats import guard",
            "peftkit.formats.guard": "import torch",
            "peftkit_cli.app": "from peftkit_cli import render\nfrom peftkit import errors",
            "peftkit_cli.render": "from rich.table import Table",
            "peftkit.__init__": "from peftkit.quant.layers import x",
        }
    )


def test_the_library_leads_to_no_application():
    names = re.compile(rf"\b(?:{'|'.join(APPLICATIONS)})[.:]\w+")
    found = {
        name: names.findall(source)
        for name, source in modules().items()
        if name.startswith("peftkit.")
    }
    assert not {name: words for name, words in found.items() if words}


def test_applications_import_what_peftkit_exports_and_what_is_public():
    sources = modules()
    public = imports({"peftkit.__init__": sources["peftkit.__init__"]})
    exported = {(each.target, name) for each in public for name in each.names}
    used = set()
    for found in imports(sources):
        if found.importer.startswith("peftkit.") or found.target.split(".")[0] != "peftkit":
            continue
        names = tuple(name for name in found.names if (found.target, name) not in exported)
        if names or not found.names:
            used |= {*map(short_name, _own_targets(found._replace(names=names), sources))}
    public_names = set(PUBLIC.split())
    assert used == public_names, sorted(used ^ public_names)
    assert len(public_names) <= MAX_PUBLIC


def test_every_allowed_importer_imports_its_package():
    importers: dict[str, set[str]] = {package: set() for package in IMPORTERS}
    for found in imports(modules()):
        importers.get(found.target.split(".")[0], set()).add(short_name(found.importer))
    unused = [
        f"{package}: {pattern}"
        for package, patterns in IMPORTERS.items()
        for pattern in patterns
        if not any(fits(name, pattern) for name in importers[package])
    ]
    assert not unused, unused


def test_training_names_no_method():
    sources = modules()
    named = [
        f"{each.where}: {target}"
        for each in imports(sources)
        if short_name(each.importer).startswith("train/")
        for target in _own_targets(each, sources)
        if short_name(target).startswith("methods/")
    ]
    assert not named, "\n".join(named)


@pytest.mark.parametrize("module", CLOSURES)
def test_a_recipe_and_its_run_import_what_they_need(module):
    sources = modules()
    edges: dict[str, set[str]] = {name: set() for name in sources}
    for found in imports(sources):
        if found.is_eager:
            edges[found.importer] |= {*_own_targets(found, sources)} & sources.keys()
    seen, open_ends = set[str](), [module]
    while open_ends:
        if (name := open_ends.pop()) not in seen:
            seen.add(name)
            open_ends += edges[name]
    loaded = [name for name in seen if not name.endswith(".__init__")]
    assert len(loaded) <= CLOSURES[module], "\n".join(sorted(loaded))


OTHERS = ("transformers", "datasets", "accelerate", "torch._dynamo")


def test_importing_it_leaves_slow_libraries_unloaded():
    code = f"""
import sys, {", ".join(WITHOUT_TORCH)}
print([name for name in ("torch", *{OTHERS!r}) if name in sys.modules])
import peftkit.recipe
print([name for name in {OTHERS!r} if name in sys.modules])
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]"]
