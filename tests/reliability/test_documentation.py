"""docs/reliability.md names the tests that hold its promises; they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))


def test_every_promise_names_a_test() -> None:
    promises = PAGE.read_text(encoding="utf-8").partition("## Not promised")[0].split("\n- ")[1:]
    assert len(promises) > 20
    assert not [promise for promise in promises if "::" not in promise]


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
