"""Pages of promises name the tests that hold them, and say which of them are slow."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGES = {
    name: (TESTS.parent / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("reliability", "threat-model")
}
NAMED = sorted(
    {
        match
        for text in PAGES.values()
        for match in re.findall(r"`([\w/]+\.py)::(\w+)`(?: \(((?:partly )?slow)\))?", text)
    }
)


@pytest.mark.parametrize(("page", "number"), [("reliability", 20), ("threat-model", 10)])
def test_every_promise_names_a_test(page, number):
    promises = PAGES[page].partition("## Not promised")[0].split("\n- ")[1:]
    assert len(promises) > number
    assert not [promise for promise in promises if "::" not in promise]


@pytest.mark.parametrize(("file", "name", "told"), NAMED, ids=[name for _, name, _ in NAMED])
def test_a_test_that_is_named_runs_in_make_test_or_is_called_slow(file, name, told):
    assert slowness((TESTS / file).read_text(encoding="utf-8"), name) == told


def slowness(code: str, name: str) -> str:
    """Return "slow" if `make test` leaves a test out, "partly slow" if some of its cases."""
    tree = ast.parse(code)
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
        (f"@parametrize('a', [1, {SLOW_CASE}])\ndef test(): ...", "partly slow"),
        (f"CASES = [{SLOW_CASE}]\n@parametrize('a', CASES)\ndef test(): ...", "partly slow"),
    ],
)
def test_slow_tests_are_seen(code, expected):
    assert slowness(code, "test") == expected
