"""Validation errors in plain words: pydantic's errors, told to someone writing a recipe.

An error's `loc` holds more than keys (the tag of a section's type, the branch of a union), so it
is walked along the config classes to find the key it means and what was declared there.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from peftkit.config.strict_yaml import Key, Problem, SourceLocation, plain_value
from peftkit.errors import PeftkitError, did_you_mean

_CONTAINERS = (tuple, list, dict, Mapping)
_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    types.NoneType: "null",
}
_TRUTH_LIKE = {"yes", "no", "on", "off", "y", "n", "true", "false"}
_TYPE_ERRORS = {"literal_error", "is_instance_of", "int_from_float", "int_parsing_size"}


class _Spot(NamedTuple):
    """What an error is about."""

    key: Key
    declared: Any
    section: type[BaseModel] | None  # the class the last part of `key` is a field of
    union: Key | None  # the key whose declared type gave one finding for each of its branches


def problems_of(
    root: type[BaseModel], error: ValidationError, places: Mapping[Key, SourceLocation]
) -> list[Problem]:
    """Translate pydantic's errors: one problem per key, with the place it was written."""
    spotted = [(_spot(root, found["loc"]), found) for found in error.errors(include_url=False)]
    problems = []
    for spot, found in _merged(spotted):
        key, text = _told(root, spot, found)
        problems.append(Problem(_place(places, key), key, text))
    return problems


def options_of(declared: Any) -> tuple[Any, ...]:
    """Return the alternatives of a declared type, flattened: `int | None` gives (int, NoneType)."""
    origin = get_origin(declared)
    if origin is Annotated:
        return options_of(get_args(declared)[0])
    if origin in (Union, types.UnionType):
        return tuple(option for arg in get_args(declared) for option in options_of(arg))
    return (declared,)


def _place(places: Mapping[Key, SourceLocation], key: Key) -> SourceLocation:
    """Return where the key was written, or else the section around it."""
    return next(places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in places)


def _spot(root: type[BaseModel], loc: tuple[int | str, ...]) -> _Spot:
    key: Key = ()
    declared: Any = root
    section: type[BaseModel] | None = None
    union: Key | None = None
    for index, part in enumerate(loc):
        options = [option for option in options_of(declared) if option is not types.NoneType]
        if len(options) > 1:  # this part names the branch, not a key
            chosen = next(
                (o for o in options if _is_section(o) and part in (o.__name__, *_type_names(o))),
                None,
            )
            if chosen is None:
                union = key if union is None else union
                chosen = next((o for o in options if get_origin(o) in _CONTAINERS), declared)
            # A union whose branch holds no more keys is described as a whole.
            if _is_section(chosen) or index + 1 < len(loc):
                declared = chosen
            continue
        if part == "[key]":
            declared = str
            break
        key = (*key, part)
        if _is_section(options[0]):
            section = options[0]
            field = section.model_fields.get(str(part))
            declared = field.annotation if field else None
        else:
            section = None
            inner = [arg for arg in get_args(options[0]) if arg is not Ellipsis]
            declared = inner[-1] if inner else Any
    return _Spot(key, declared, section, union)


def _is_section(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseModel)


def _type_names(section: type[BaseModel]) -> tuple[Any, ...]:
    """Return the values of a section's `type` that choose this class."""
    field = section.model_fields.get("type")
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()


def _merged(spotted: list[tuple[_Spot, Any]]) -> Iterable[tuple[_Spot, Any]]:
    """Keep the most useful error of each union: the deepest; a broken rule before a wrong type."""
    groups: dict[object, list[tuple[_Spot, Any]]] = {}
    for number, (spot, found) in enumerate(spotted):
        groups.setdefault(number if spot.union is None else spot.union, []).append((spot, found))
    for group in groups.values():
        deepest = max(len(spot.key) for spot, _ in group)
        kept: dict[Key, tuple[_Spot, Any]] = {}
        for spot, found in group:
            if len(spot.key) == deepest:
                rule = not _is_type_error(found["type"])
                if spot.key not in kept or rule:
                    kept[spot.key] = (spot, found)
        yield from kept.values()


def _is_type_error(kind: str) -> bool:
    return kind.endswith("_type") or kind in _TYPE_ERRORS


def _told(root: type[BaseModel], spot: _Spot, found: Mapping[str, Any]) -> tuple[Key, str]:
    """Return the key an error is about, and the message."""
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    if kind == "extra_forbidden":
        return spot.key, _unknown(root, spot)
    if kind == "missing":
        return spot.key, f"is required and missing; expected {describe(spot.declared)}"
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        return _wrong_tag(spot, kind, value, context)
    if kind in {"value_error", "assertion_error"}:
        error = context["error"]
        parts = (
            (error.asked, error.found, error.fix) if isinstance(error, PeftkitError) else (error,)
        )
        return spot.key, " ".join(" ".join(str(part).split()) for part in parts if str(part))
    if _is_type_error(kind):
        text = f"expected {describe(spot.declared)}; found {show(value)}"
        return spot.key, " ".join(filter(None, (text + ".", _hint(spot, value)))).removesuffix(".")
    declared = options_of(spot.declared)
    rule = re.sub(r"^\w+ should", "must", found["msg"])  # pydantic's own sentence
    hint = ". Write null for none" if value == 0 and types.NoneType in declared else ""
    return spot.key, f"{rule}; found {show(value)}{hint}"


def _wrong_tag(spot: _Spot, kind: str, value: Any, context: Mapping[str, Any]) -> tuple[Key, str]:
    """Say which types a section can have. pydantic quotes the names as Python literals."""
    name = context["discriminator"].strip("'")
    sections = [option for option in options_of(spot.declared) if _is_section(option)]
    tags = [tag for s in sections for tag in get_args(s.model_fields[name].annotation)]
    expected = f"expected {_one_of(tags)}"
    if kind == "union_tag_not_found":
        return (*spot.key, name), f"is required and missing; {expected}"
    tag = value.get(name)
    return (*spot.key, name), f"{expected}; found {show(tag)}. {_near(tag, tags)}".rstrip(". ")


def _unknown(root: type[BaseModel], spot: _Spot) -> str:
    """Suggest the field that was meant: in this section first, then in the others."""
    word = str(spot.key[-1])
    fields = list(spot.section.model_fields) if spot.section else []
    if near := _near(word, fields):
        return f"unknown key. {near}"
    for name, field in root.model_fields.items():
        for option in options_of(field.annotation):
            if not _is_section(option) or word not in option.model_fields:
                continue
            if name != spot.key[0]:
                return f"unknown key. Did you mean '{name}.{word}'?"
            return f"unknown key here; it belongs to the type {_one_of(_type_names(option))}"
    return f"unknown key. Known here: {', '.join(fields)}"


def _near(word: object, options: Iterable[Any]) -> str:
    """Like did_you_mean, and also finds `lr` for learning_rate and a name within the word."""
    words = [option for option in options if isinstance(option, str)]
    if not isinstance(word, str) or not word:
        return ""
    initials = {"".join(part[:1] for part in name.split("_")): name for name in reversed(words)}
    within = [name for name in words if len(name) > 3 and name in word.lower()]
    guess = did_you_mean(word.lower(), words)
    if not guess and (name := initials.get(word.lower()) if len(word) > 1 else None):
        guess = f"Did you mean '{name}'?"
    return guess or (f"Did you mean '{within[0]}'?" if within else "")


def _hint(spot: _Spot, value: object) -> str:
    """Say how the value should be written, if that is known."""
    options = options_of(spot.declared)
    literals = [v for option in options if get_origin(option) is Literal for v in get_args(option)]
    if value is None and spot.section and spot.key:
        field = spot.section.model_fields[str(spot.key[-1])]
        return "" if field.is_required() else "Leave the key out for its default"
    if isinstance(value, float) and value.is_integer() and int in options:
        return f"Write {int(value)}"
    if isinstance(value, str):
        number = plain_value(value.replace("_", "").strip())
        if isinstance(number, float | int) and {int, float} & set(options):
            return f"Write the number without quotes or underscores: {number}"
        if bool in options and value.lower() in _TRUTH_LIKE:
            return "Write true or false"
        if near := _near(value, literals):
            return near
        if any(get_origin(option) is tuple for option in options) and str not in options:
            return f"Write a list: [{value}]"
    if isinstance(value, bool | int | float) and {str, Path} & set(options):
        return "Put it in quotes if text is meant"
    return ""


def describe(declared: Any) -> str:
    """Say in plain words what a declared type takes."""
    options = options_of(declared)
    words = []
    for option in options:
        if option is int and float in options:
            continue
        origin = get_origin(option)
        if origin is Literal:
            words.append(_one_of(get_args(option)))
        elif origin in (tuple, list):
            words.append(f"a list of {describe(get_args(option)[0])}")
        elif origin in (dict, Mapping) or _is_section(option):
            words.append("a section (keys with values)")
        else:
            words.append(_NAMES.get(option, getattr(option, "__name__", str(option))))
    return " or ".join(dict.fromkeys(words))


def _one_of(values: Iterable[Any]) -> str:
    shown = [value if isinstance(value, str) else show(value) for value in values]
    return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"


def show(value: object) -> str:
    """Show a value as a recipe would hold it, short."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 60 else value[:57] + '...'}'"
    if isinstance(value, Mapping):
        return "a section (keys with values)"
    if isinstance(value, tuple | list):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
