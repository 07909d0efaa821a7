"""Tests that `make test` runs only if files that they cover changed: `make test CHANGED=REV`.

Folders in FOLDERS, and tests marked `covers(*sources)`; a test marked `smoke` always runs.
"""

import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "tests/simulated_gpu": (
        *("peftkit/base", "peftkit/execution", "peftkit/forward", "peftkit/inference"),
        *("peftkit/kernels", "peftkit/planning", "peftkit/quant", "peftkit/train"),
        "cli/peftkit_server/tinker",
    ),
    "tests/cross_compile": ("peftkit/forward", "peftkit/kernels", "peftkit/quant"),
}
"""Folders of tests, with the files and folders that they cover."""

EVERYTHING = ("tests/conftest.py", "tests/helpers", "pyproject.toml", "constraints.txt")
"""Files and folders of which a change concerns every test."""


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


def is_due(item: pytest.Item, changed: Collection[str]) -> bool:
    """Return whether a test runs in `make test` after a change to some files."""
    if item.get_closest_marker("smoke"):
        return True
    file = item.path.relative_to(ROOT).as_posix()
    sources = {name for mark in item.iter_markers("covers") for name in mark.args}
    for folder, covered in FOLDERS.items():
        if is_under(file, [folder]):
            sources |= {folder, *covered}
    if not sources:
        return True
    return any(is_under(name, {*sources, *EVERYTHING, file}) for name in changed)
