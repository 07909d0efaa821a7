"""Pages of promises name their tests, and which of them `make test` leaves out."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.changed import COVERED, is_under

TESTS = Path(__file__).parents[1]
PAGES = {
    name: (TESTS.parent / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("reliability", "threat-model")
}
NAMED = sorted(
    {
        match
        for text in PAGES.values()
        for match in re.findall(
            r"`([\w/]+\.py)::(\w+)`(?: \(((?:partly )?slow|by change)\))?", text
        )
    }
)


@pytest.mark.parametrize(("page", "number"), [("reliability", 20), ("threat-model", 10)])
def test_every_promise_names_a_test(page, number):
    promises = PAGES[page].partition("## Not promised")[0].split("\n- ")[1:]
    assert len(promises) > number
    assert not [promise for promise in promises if "::" not in promise]


def test_tests_that_are_named_run_in_make_test_or_have_their_mark():
    wrong = []
    for file, name, mark in NAMED:
        covers = is_under(f"tests/{file}", COVERED)
        found = when_left_out((TESTS / file).read_text(encoding="utf-8"), name, covers)
        if found != mark:
            wrong.append(f"{file}::{name} is {found or 'in make test'}, not {mark or 'unmarked'}")
    assert not wrong


parsed = cache(ast.parse)


def when_left_out(code: str, name: str, by_change: bool = False) -> str:
    """Return "slow" if only `make test-all` runs a test, "partly slow" if some of its cases.

    "by change": `make test CHANGED=REV` runs it if files that it covers changed.
    """
    tree = parsed(code)
    (test,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    whole = {ast.unparse(each) for each in test.decorator_list}
    if "pytestmark" in assigned:
        whole.add(ast.unparse(assigned["pytestmark"]))
    if "pytest.mark.slow" in whole:
        return "slow"
    by_change |= any(mark.startswith("pytest.mark.covers") for mark in whole)
    if by_change and "pytest.mark.smoke" not in whole:
        return "by change"
    inside = [node for each in test.decorator_list for node in ast.walk(each)]
    names = {node.id for node in inside if isinstance(node, ast.Name)}
    parts = [*whole, *(ast.unparse(assigned[name]) for name in names & assigned.keys())]
    return "partly slow" if any("mark.slow" in part for part in parts) else ""


SLOW_CASE = "pytest.param(2, marks=pytest.mark.slow)"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def test(): ...", ""),
        ("@pytest.mark.slow\ndef test(): ...", "slow"),
        ("pytestmark = pytest.mark.slow\ndef test(): ...", "slow"),
        ("@pytest.mark.covers('a')\ndef test(): ...", "by change"),
        ("@pytest.mark.smoke\n@pytest.mark.covers('a')\ndef test(): ...", ""),
        (f"@parametrize('a', [1, {SLOW_CASE}])\ndef test(): ...", "partly slow"),
        (f"CASES = [{SLOW_CASE}]\n@parametrize('a', CASES)\ndef test(): ...", "partly slow"),
    ],
)
def test_marks_are_seen(code, expected):
    assert when_left_out(code, "test") == expected
