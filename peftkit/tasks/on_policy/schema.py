"""Whether a value is of a JSON schema, for the keywords that say what a model is to write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peftkit.errors import ConfigError

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
KNOWN = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
    *("minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength", "pattern", "anyOf"),
}
SAID = {"$schema", "$id", "title", "description", "default", "examples"}
"""Keywords that ask for nothing."""


def matches(value: Any, schema: Mapping[str, Any]) -> bool:
    """Tell whether a value is of a schema.

    Raises:
        ConfigError: The schema has keywords that are not known here.
    """
    if unknown := schema.keys() - KNOWN - SAID:
        raise ConfigError(
            f"the JSON schema uses {', '.join(sorted(unknown))}",
            found=f"Known here: {', '.join(sorted(KNOWN))}.",
            fix="Write a reward function for it: FILE.py:FUNCTION.",
        )
    if "anyOf" in schema and not any(matches(value, one) for one in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "type" in schema and not _is_of(value, schema["type"]):
        return False
    return _in_bounds(value, schema) and _inside(value, schema)


def _is_of(value: Any, names: Any) -> bool:
    asked = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in asked
    return any(isinstance(value, TYPES[name]) for name in asked)


def _in_bounds(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum"), schema.get("maximum")
    elif isinstance(value, str):
        low, high = schema.get("minLength"), schema.get("maxLength")
        if "pattern" in schema and re.search(schema["pattern"], value) is None:
            return False
        value = len(value)
    elif isinstance(value, list):
        low, high, value = schema.get("minItems"), schema.get("maxItems"), len(value)
    else:
        return True
    return (low is None or value >= low) and (high is None or value <= high)


def _inside(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, list):
        return all(matches(item, schema.get("items", {})) for item in value)
    if not isinstance(value, dict):
        return True
    known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not set(schema.get("required", ())) <= value.keys():
        return False
    for name, item in value.items():
        if name in known:
            if not matches(item, known[name]):
                return False
        elif other is False or (isinstance(other, dict) and not matches(item, other)):
            return False
    return True
