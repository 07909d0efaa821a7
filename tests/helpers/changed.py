"""Tests that `make test` runs only if files that they cover changed: `make test CHANGED=REV`.

Those in COVERED, tests marked `covers(*sources)`, and most cases of large grids, which cover the
package; a test marked `smoke` always runs.
"""

import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

ROOT = Path(__file__).parents[2]
GPU_CODE = ("base", "execution", "forward", "inference", "kernels", "methods", "model", "planning")
GPU_CODE += ("quant", "tasks", "train")
COVERED = {
    "tests/simulated_gpu": (*(f"peftkit/{name}" for name in GPU_CODE), "cli/peftkit_server"),
    "tests/cross_compile": ("peftkit/forward", "peftkit/kernels", "peftkit/quant"),
    "tests/cli/test_quickstart.py": ("peftkit", "cli/peftkit_cli", "recipes"),
    "tests/cli/test_sweeps.py": ("peftkit", "cli/peftkit_cli"),
    "tests/inference/test_generate_media.py": ("peftkit",),
    "tests/planning/test_plan.py": ("peftkit", "cli/peftkit_cli/plan.py"),
    "tests/planning/test_resolve.py": ("peftkit",),
    "tests/server": ("peftkit", "cli/peftkit_server"),
    "tests/studio": ("peftkit", "cli/peftkit_studio"),
    **{
        f"tests/tasks/{name}.py": ("peftkit",)
        for name in (
            *("distill/test_run", "on_policy/test_runs", "on_policy/test_tools", "test_anchor"),
            *("test_folder_of_classes", "test_mixers", "test_speech_runs"),
        )
    },
    **{
        f"tests/train/{name}.py": ("peftkit",)
        for name in ("test_compiled", "test_sharding", "test_world")
    },
    "tests/cli/test_prove.py": ("peftkit", "cli/peftkit_cli"),
    "tests/cli/test_import_recipe.py": ("peftkit/config", "peftkit/tasks", "cli/peftkit_cli"),
    "tests/formats/test_hub.py": ("peftkit",),
    "tests/inference/test_recorded.py": ("peftkit",),
    "tests/inference/test_short_of_memory.py": ("peftkit", "cli/peftkit_server"),
}
"""Folders and files of tests, with the files and folders that they cover."""

PACKAGES = ("peftkit", "cli", "benchmarks")
LARGE_GRID, ONE_OF = 4, 4

EVERYTHING = ("tests/conftest.py", "tests/helpers", "pyproject.toml", "constraints.txt")
"""Files and folders of which a change concerns every test."""


@cache
def changed_since(revision: str, root: Path = ROOT) -> set[str] | None:
    """Return the files that differ from a revision's common ancestor with HEAD, or are new.

    None: git does not know the revision, as in a shallow clone. Nothing changed since "".
    """
    if not revision:
        return set()
    changed = set[str]()
    for command in (
        ("diff", "--name-only", "--merge-base", revision, "--"),
        ("ls-files", "--others", "--exclude-standard"),
    ):
        try:
            done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        if done.returncode:
            return None
        changed |= {*done.stdout.splitlines()}
    return changed


def is_under(file: str, places: Collection[str]) -> bool:
    """Return whether a file is one of some files, or lies in one of some folders."""
    return any(file == place or file.startswith(f"{place}/") for place in places)


@cache
def covered_by(path: Path) -> tuple[str, set[str]]:
    """Return a test file's path from ROOT, and the files and folders that COVERED lists for it."""
    file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    sources = [{tests, *covered} for tests, covered in COVERED.items() if is_under(file, [tests])]
    return file, set().union(*sources)


def is_due(item: pytest.Item, changed: Collection[str]) -> bool:
    """Return whether a test runs in `make test` after a change to some files."""
    file, sources = covered_by(item.path)
    sources = sources.union(*(mark.args for mark in item.iter_markers("covers")))
    if not sources or item.get_closest_marker("smoke"):
        return True
    return any(is_under(name, {*sources, *EVERYTHING, file}) for name in changed)


def due_of(items: Sequence[pytest.Item], changed: Collection[str]) -> Iterator[bool]:
    """Return which tests run in `make test` after a change to some files.

    A grid of more than LARGE_GRID cases keeps its first case, and about one of ONE_OF others.
    """
    fast = (item for item in items if item.get_closest_marker("slow") is None)
    cases = Counter(item.nodeid.partition("[")[0] for item in fast)
    whole, seen = any(is_under(name, {*PACKAGES, *EVERYTHING}) for name in changed), set[str]()
    for item in items:
        law = item.nodeid.partition("[")[0]
        is_sampled = law not in seen or crc32(item.nodeid.encode()) % ONE_OF == 0
        seen.add(law)
        is_in_grid = whole or cases[law] <= LARGE_GRID or is_sampled
        yield is_due(item, changed) and (is_in_grid or covered_by(item.path)[0] in changed)


def is_left_out(path: Path, changed: Collection[str]) -> bool:
    """Return whether COVERED leaves out a whole file of tests, of which none is marked `smoke`."""
    file, sources = covered_by(path)
    if not sources or path.suffix != ".py":
        return False
    due = any(is_under(name, {*sources, *EVERYTHING, file}) for name in changed)
    return not due and "pytest.mark.smoke" not in path.read_text(encoding="utf-8")
