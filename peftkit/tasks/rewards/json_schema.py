"""Validate values against JSON schemas; supports the keywords in SUPPORTED."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peftkit.errors import ConfigError
from peftkit.files.safe_regex import searched
from peftkit.files.strict_json import JsonMap

Search = Callable[[str, str], bool]
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
SUPPORTED = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
    *("minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength", "pattern", "anyOf"),
}
ANNOTATIONS = {"$schema", "$id", "title", "description", "default", "examples"}
"""Keywords without constraints."""


def _searched(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def matches(value: object, schema: JsonMap, search: Search = _searched) -> bool:
    """Return whether a value is valid against a schema.

    Args:
        search: Returns whether a pattern matches anywhere in a text.

    Raises:
        ConfigError: The schema has unsupported keywords.
    """
    if unknown := schema.keys() - SUPPORTED - ANNOTATIONS:
        raise ConfigError(
            f"the JSON schema uses {', '.join(sorted(unknown))}",
            found=f"Supported: {', '.join(sorted(SUPPORTED))}.",
            fix="Write a reward function for it: FILE.py:FUNCTION.",
        )
    if "anyOf" in schema and not any(matches(value, one, search) for one in schema["anyOf"]):
        return False
    if "enum" in schema and not any(is_same(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not is_same(value, schema["const"]):
        return False
    if "type" in schema and not _is_of(value, schema["type"]):
        return False
    return _in_bounds(value, schema, search) and _inside(value, schema, search)


def _is_of(value: object, names: str | Sequence[str]) -> bool:
    types = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, TYPES[name]) for name in types)


def _in_bounds(value: Any, schema: JsonMap, search: Search) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum"), schema.get("maximum")
    elif isinstance(value, str):
        low, high = schema.get("minLength"), schema.get("maxLength")
        if "pattern" in schema and not search(schema["pattern"], value):
            return False
        value = len(value)
    elif isinstance(value, list):
        low, high, value = schema.get("minItems"), schema.get("maxItems"), len(value)
    else:
        return True
    return (low is None or value >= low) and (high is None or value <= high)


def _inside(value: object, schema: JsonMap, search: Search) -> bool:
    if isinstance(value, list):
        return all(matches(item, schema.get("items", {}), search) for item in value)
    if not isinstance(value, dict):
        return True
    properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not set(schema.get("required", ())) <= value.keys():
        return False
    for name, item in value.items():
        if name in properties:
            if not matches(item, properties[name], search):
                return False
        elif other is False or (isinstance(other, dict) and not matches(item, other, search)):
            return False
    return True


def all_matches(
    values: Sequence[object], schema: Mapping[str, object], seconds: float
) -> list[bool]:
    """Return which values are valid against a schema.

    Args:
        seconds: Time limit for the regular expressions.

    Raises:
        TimeoutError: The regular expressions take longer.
        ConfigError: As `matches`.
    """
    search = _Searches()
    while True:
        answers = [matches(value, schema, search) for value in values]
        if not search.missing:
            return answers
        search.find(seconds)


class _Searches:
    """Deferred searches of patterns: until `find`, a new search counts as a match."""

    def __init__(self) -> None:
        self.missing: dict[tuple[str, str], None] = {}
        self._results: dict[tuple[str, str], bool] = {}

    def __call__(self, pattern: str, text: str) -> bool:
        if (pattern, text) not in self._results:
            self.missing[pattern, text] = None
        return self._results.get((pattern, text), True)

    def find(self, seconds: float) -> None:
        """Run the missing searches."""
        self._results.update(zip(self.missing, searched([*self.missing], seconds), strict=True))
        self.missing = {}


def is_same(a: object, b: object) -> bool:
    """Return whether two JSON values are equal; to Python, True is 1 and False is 0."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return isinstance(a, bool) is isinstance(b, bool) and bool(a == b)
