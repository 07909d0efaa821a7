"""Test modules share code through tests/helpers, never by importing each other."""

import ast
from pathlib import Path

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
