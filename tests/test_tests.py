"""Test modules share code through tests/helpers; changed files decide which tests run."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.changed import COVERED, EVERYTHING, LARGE_GRID, changed_since, due_of, is_due

TESTS = Path(__file__).parent
OWN_MODULES = ("helpers", "peers", "simulated_gpu", "cross_compile")
"""Packages of tests/ that hold modules without tests."""


def test_no_module_imports_a_test_module_or_a_conftest():
    breaches = []
    for folder in (TESTS, TESTS.parent / "benchmarks"):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                else:
                    continue
                for name in names:
                    parts = name.split(".")
                    if parts[0] == "tests" and any(
                        part == "conftest" or part.startswith("test_") for part in parts
                    ):
                        breaches.append(f"{path.relative_to(TESTS.parent)}:{node.lineno}: {name}")
    assert breaches == []


def test_shared_modules_are_in_helpers():
    elsewhere = [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).parts[0] not in OWN_MODULES
        if path.name != "conftest.py" and not path.name.startswith("test_")
    ]
    assert elsewhere == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with one commit, in which a file has changed and another is new."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "old.py").write_text("a = 1\n")
    (tmp_path / "same.py").write_text("b = 1\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "old.py").write_text("a = 2\n")
    (tmp_path / "new.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("revision", "expected"), [("HEAD", {"old.py", "new.py"}), ("", set()), ("v9", None)]
)
def test_changes_are_those_since_the_common_ancestor_and_new_files(revision, expected, repository):
    assert changed_since(revision, repository) == expected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("peftkit/planning/plan.py", True),
        ("peftkit/planning_of_others.py", False),
        ("cli/peftkit_cli/plan.py", True),
        ("tests/test_tests.py", True),
        ("tests/helpers/folders.py", True),
        ("README.md", False),
    ],
)
def test_a_test_runs_if_a_file_that_it_covers_changed(file, expected, request):
    assert is_due(request.node, set())  # covers nothing in particular
    request.node.add_marker(pytest.mark.covers("peftkit/planning", "cli/peftkit_cli/plan.py"))
    assert not is_due(request.node, set())
    assert is_due(request.node, {file}) == expected
    request.node.add_marker("smoke")
    assert is_due(request.node, set())


@pytest.mark.parametrize(
    ("num_cases", "changed"), [(4, ""), (9, ""), (41, ""), (41, "peftkit/run.py")]
)
def test_a_large_grid_keeps_its_first_case_and_a_sample_until_code_changes(num_cases, changed):
    class Case:
        path = Path(__file__)
        get_closest_marker, iter_markers = (lambda _, name: None), (lambda _, name: ())

    items = [Case() for _ in range(num_cases)]
    for number, item in enumerate(items):
        item.nodeid = f"tests/test_tests.py::test[{number}]"
    due = [*due_of(items, {changed} - {""})]
    assert due[0]
    assert 0 < sum(due) < num_cases / 2 or all(due)
    assert all(due) == (num_cases <= LARGE_GRID or bool(changed))


def test_covered_files_exist():
    code = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    marked = re.findall(r"pytest\.mark\.covers\(([^)]*)\)", code)
    places = {place for text in marked for place in re.findall(r'"([^"]+)"', text)}
    places |= {*COVERED, *EVERYTHING, *(place for covered in COVERED.values() for place in covered)}
    assert not [place for place in places if not (TESTS.parent / place).exists()]


def test_the_simulated_card_keeps_a_sample():
    code = [path.read_text(encoding="utf-8") for path in TESTS.glob("simulated_gpu/test_*.py")]
    assert sum("pytest.mark.smoke" in text for text in code) >= 8
