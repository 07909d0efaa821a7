"""Built-in rewards, and JSON schemas."""

import json
import time
from pathlib import Path

import pytest

from peftkit.errors import ConfigError, RunError
from peftkit.tasks.rewards.json_schema import all_matches, matches
from peftkit.tasks.rewards.reward_functions import Rewards, RewardTerm

RIGHT = '{"item": "tea", "size": "L"}'


@pytest.mark.parametrize(
    ("term", "text", "worth"),
    [
        ({"use": "exact_match"}, f" {RIGHT}\n", 1.0),
        ({"use": "exact_match"}, "{}", 0.0),
        ({"use": "json_fields"}, RIGHT, 1.0),
        ({"use": "json_fields"}, '{"item": "tea", "size": "M"}', 0.6),
        ({"use": "json_fields"}, "tea", 0.0),
        ({"use": "json_schema", "schema_file": "schema.json"}, RIGHT, 1.0),
        ({"use": "json_schema", "schema_file": "schema.json"}, '{"item": 3}', 0.0),
        ({"use": "regex", "pattern": "te."}, RIGHT, 1.0),
        ({"use": "regex", "pattern": "^te."}, RIGHT, 0.0),
        ({"use": "length", "max_chars": 4}, "abcdef", 0.5),
        ({"use": "length", "max_chars": 4}, "abc", 1.0),
    ],
)
def test_a_built_in_reward(term, text, worth, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["size"]}
    Path("schema.json").write_text(json.dumps(schema))
    if "schema_file" in term:
        term = {**term, "schema_file": Path(term["schema_file"])}
    judge = Rewards((RewardTerm(weight=2.0, **term),), 10.0)
    for completion in (text, [{"role": "assistant", "content": text}]):
        (total,), _ = judge.judge(["p"], [completion], {"references": [RIGHT]}, ["p:1"])
        assert total == pytest.approx(2 * worth)


@pytest.mark.parametrize(
    ("right", "text", "worth"),
    [
        ('{"item": "tea", "size": null}', '{"item": "tea"}', 0.6),
        ('{"size": null}', '{"size": null}', 1.0),
        ('{"count": 1}', '{"count": true}', 0.2),
        ('{"hot": false}', '{"hot": 0}', 0.2),
        ('{"sizes": [1, {"a": 0}]}', '{"sizes": [1, {"a": false}]}', 0.2),
        ('{"count": 1}', '{"count": 1.0}', 1.0),
    ],
)
def test_a_field_is_right_with_the_same_value(right, text, worth):
    judge = Rewards((RewardTerm(use="json_fields"),), 10.0)
    (total,), _ = judge.judge(["p"], [text], {"references": [right]}, ["p:1"])
    assert total == pytest.approx(worth)


@pytest.mark.parametrize(
    ("value", "schema", "fits"),
    [
        (3, {"type": "integer", "minimum": 3, "maximum": 4}, True),
        (5, {"type": "number", "maximum": 4}, False),
        (True, {"type": ["boolean", "null"]}, True),
        ("ab", {"type": "string", "pattern": "^a", "maxLength": 2}, True),
        ([1, "x"], {"type": "array", "items": {"type": "integer"}}, False),
        ({"a": 1, "b": 2}, {"properties": {"a": {}}, "additionalProperties": False}, False),
        ("c", {"enum": ["a", "b"]}, False),
        (1, {"anyOf": [{"type": "string"}, {"const": 1}]}, True),
        (True, {"const": 1}, False),
        ([0], {"enum": [[False]]}, False),
    ],
)
def test_a_json_schema(value, schema, fits):
    assert matches(value, schema) is fits


def test_a_keyword_that_is_not_known_is_named():
    with pytest.raises(ConfigError, match=r"uses \$ref, oneOf"):
        matches(1, {"oneOf": [], "$ref": "#"})


SLOW = "(a+)+b"
"""Takes minutes on thirty letters, and holds the interpreter's lock."""


@pytest.mark.parametrize("use", ["regex", "json_schema"])
def test_a_pattern_that_takes_too_long_ends_at_the_timeout(tmp_path, use):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "string", "pattern": SLOW}))
    term = (
        RewardTerm(use="regex", pattern=SLOW)
        if use == "regex"
        else RewardTerm(use="json_schema", schema_file=schema)
    )
    text = "a" * 26
    answer = text if use == "regex" else json.dumps(text)
    began = time.perf_counter()
    with pytest.raises(RunError, match=rf"the reward {use} took longer than 0.4 seconds"):
        Rewards([term], 0.4).judge(["p"], [answer], {"references": [None]}, ["a.jsonl:1"])
    assert time.perf_counter() - began < 2


def test_patterns_of_all_branches_are_searched():
    schema = {"anyOf": [{"pattern": "^a"}, {"pattern": "b$", "minLength": 2}]}
    values = ["ax", "xb", "b", "x", 3, "ab"]
    expected = [matches(value, schema) for value in values]
    assert all_matches(values, schema, 30.0) == expected
    assert expected == [True, True, False, False, True, True]
