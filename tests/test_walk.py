"""How much of the code one small training run goes through, and how large the packages are.

A budget is a maximum. A commit that lowers a number lowers its budget; one that raises a budget
gives its reason in the message.
"""

import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType

import pytest

ROOT = Path(__file__).parents[1]

WALK = {"files": 116, "lines": 11_600, "climbs": 77}
"""Budgets of `peftkit train` with LoRA on nf4 and packed rows, on a CPU:

- files with an executed function;
- lines of the executed functions;
- climbs: pairs of files of which the first calls the second, perhaps through a library, and does
  not import it.

They differ by a few lines on a machine so slow that the run prints its progress.
"""

SIZES = {
    "peftkit": 64_300,
    "cli/peftkit_cli": 6_400,
    "cli/peftkit_server": 11_000,
    "cli/peftkit_studio": 1_800,
    "tests": 66_600,
}
"""Budgets of the lines of Python in each folder, in hundreds."""

RECIPE = """
base: {model: MODEL, quantize: nf4}
method: {type: lora, rank: 4, alpha: 8, targets: [q, k, v, o, gate, up, down]}
data: {train: train.jsonl, eval: eval.jsonl, max_length: 128, packing: true}
train: {output_dir: out, epochs: 2, batch_size: 2, learning_rate: 2e-4}
"""

Function = tuple[str, int]
"""A file, from ROOT, and the first line of a function in it."""


def trace() -> None:
    """Train with recipe.yaml; write the executed functions and the calls between files."""
    executed: set[Function] = set()
    calls: set[tuple[str, str]] = set()
    paths: dict[str, str] = {}

    def path_of(frame: FrameType) -> str:
        """Return the path of our code from ROOT, and an empty string for other code."""
        name = frame.f_code.co_filename
        if name not in paths:
            path = Path(name)
            ours = any(path.is_relative_to(ROOT / top) for top in ("peftkit", "cli"))
            paths[name] = path.relative_to(ROOT).as_posix() if ours else ""
        return paths[name]

    def on_call(frame: FrameType, *_: object) -> None:
        file, name = path_of(frame), frame.f_code.co_name
        if file and not name.startswith("<"):  # neither modules, comprehensions nor lambdas
            executed.add((file, frame.f_code.co_firstlineno))
            caller = frame.f_back
            while caller and not path_of(caller):  # a library calls us back
                caller = caller.f_back
            if caller:
                calls.add((path_of(caller), file))

    for library in ("accelerate", "bitsandbytes", "datasets", "torch", "transformers"):
        import_module(library)  # takes twice as long while it is traced
    threading.settrace(on_call)
    sys.settrace(on_call)
    code: int = import_module("peftkit_cli.app").run(["train", "recipe.yaml"])
    sys.settrace(None)
    Path("trace.json").write_text(json.dumps([[*executed], [*calls]]), encoding="utf-8")
    sys.exit(code)


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def functions(file: str) -> dict[int, range]:
    """Return the lines of each function of a file, by the first, which may be a decorator's."""
    found = {}
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[first] = range(first, (node.end_lineno or first) + 1)
    return found


def imported(file: str) -> Iterator[str]:
    """Yield the files that a file imports from, anywhere in it."""
    for node in ast.walk(parsed(file)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            path = module.replace(".", "/") + ".py"
            yield f"cli/{path}" if module.startswith("peftkit_") else path


def test_one_run_walks_through_a_bounded_part_of_the_code(model_folder, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(model_folder)))
    for name, number in (("train", 16), ("eval", 4)):
        turns = [(f"say {n} please {'x' * (n % 5)}", f"it is {n}") for n in range(number)]
        rows = [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in turns
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = os.environ | {
        "PEFTKIT_CACHE": str(tmp_path / "cache"),  # an empty one
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")]),
    }
    done = subprocess.run(
        [sys.executable, __file__],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    executed, calls = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    lines = {
        (file, line)
        for file, first in executed
        for line in functions(file).get(first, ())  # a class body is no function
    }
    climbs = {(a, b) for a, b in calls if b not in (a, *imported(a))}
    walk = {"files": len({file for file, _ in lines}), "lines": len(lines), "climbs": len(climbs)}
    assert all(walk[name] <= budget for name, budget in WALK.items()), (walk, sorted(climbs))


@pytest.mark.parametrize("folder", SIZES)
def test_each_package_stays_within_its_lines(folder):
    files = (ROOT / folder).rglob("*.py")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lines <= SIZES[folder]


if __name__ == "__main__":
    trace()
