"""Tests that `make test` runs only if files that they cover changed: `make test CHANGED=REV`.

Those in COVERED, and tests marked `covers(*sources)`; a test marked `smoke` always runs.
"""

import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path

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
    **{
        f"tests/server/{name}.py": ("peftkit", "cli/peftkit_server")
        for name in (
            *("tinker/test_beside_a_job", "tinker/test_learning", "tinker/test_samples"),
            *("tinker/test_weights", "tuning/test_clients", "tuning/test_jobs"),
            "tuning/test_limits",
        )
    },
    **{
        f"tests/tasks/{name}.py": ("peftkit",)
        for name in (
            *("distill/test_run", "on_policy/test_runs", "on_policy/test_tools", "test_anchor"),
            *("test_folder_of_classes", "test_mixers", "test_speech_runs"),
        )
    },
    "tests/train/test_compiled.py": ("peftkit",),
}
"""Folders and files of tests, with the files and folders that they cover."""

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


def is_left_out(path: Path, changed: Collection[str]) -> bool:
    """Return whether COVERED leaves out a whole file of tests, of which none is marked `smoke`."""
    file, sources = covered_by(path)
    if not sources or path.suffix != ".py":
        return False
    due = any(is_under(name, {*sources, *EVERYTHING, file}) for name in changed)
    return not due and "pytest.mark.smoke" not in path.read_text(encoding="utf-8")
