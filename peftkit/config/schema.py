"""Frozen, strict configs, whose validation reports all errors together.

A recipe is YAML plus `section.key=value` overrides, merged and then validated. One ConfigError
lists all errors, each with its source: file and line, or override.
Configs are frozen, so lists in YAML and Python become tuples.
This module does not import torch; config classes are defined next to the code that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from peftkit.config.lazy import options_of
from peftkit.config.strict_yaml import (
    Key,
    ParsedYaml,
    Problem,
    SourceLocation,
    dotted,
    parse,
    plain_value,
)
from peftkit.errors import ConfigError, first_few, neighbours
from peftkit.files.strict_json import Json

MAX_BYTES = 1_000_000
SHORT = ("task",)
"""Sections that may be given as their type alone."""
_MAX_ERRORS = 50  # a file with more is not a recipe


class _Opened:
    """Marks a field whose texts are opened as files or URLs."""


OPENED = _Opened()
Location = Annotated[str, OPENED]
"""A path, pattern, URL or hub id. A `Path` is one as well; other texts are never opened."""


class Config(BaseModel):
    """A frozen group of settings; unknown keys and values of another type are errors.

    Docstrings below fields become their descriptions in the JSON schema. A section of several kinds
    is a union discriminated by a Literal field named `type`.

    Raises:
        ConfigError: From the constructor, with all errors.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            from peftkit.config.explain import problems_of

            name = type(self).__name__
            problems = problems_of(type(self), error, values, {(): SourceLocation("")})
            raise _config_error(f"{name}(...)", problems) from None

    # Pydantic then validates nested sections without calling __init__: the outermost call gets
    # every error with its full path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _freeze(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        declared = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: _frozen(value, declared.get(name)) for name, value in values.items()}


C = TypeVar("C", bound=Config)


def load(cls: type[C], path: Path, overrides: Sequence[str] = ()) -> C:
    """Read a YAML file, apply the overrides, and validate the result.

    Args:
        overrides: Each "section.key=value"; the value is YAML, and the last one wins.

    Raises:
        ConfigError: With all errors, each with file and line or its override.
    """
    return load_text(cls, _read(path), str(path), overrides)


def load_text(cls: type[C], text: str, source: str, overrides: Sequence[str] = ()) -> C:
    """Validate YAML text as `load` does; errors name `source` and the line.

    Raises:
        ConfigError: With all errors, and their lines in `lines`.
    """
    parsed = parse(text, lambda line: SourceLocation(source, line))
    if not isinstance(parsed.data, dict):
        text = "expected keys with values, such as 'train: {...}'"
        problem = Problem(SourceLocation(source, 1), (), text)
        raise _config_error(source, parsed.problems or [problem])
    parsed.locations[()] = SourceLocation(source)
    for number, override in enumerate(overrides, start=1):
        _apply(override, number, parsed)
    return _validated(cls, source, parsed)


def from_dict(
    cls: type[C], data: Mapping[str, object], source: str, overrides: Sequence[str] = ()
) -> C:
    """Validate a mapping; errors name `source` or the override.

    Raises:
        ConfigError: With all errors.
    """
    parsed = ParsedYaml(dict(data), {(): SourceLocation(source)})
    for number, override in enumerate(overrides, start=1):
        _apply(override, number, parsed)
    return _validated(cls, source, parsed)


def dump_yaml(config: Config, *, only_set: bool = False) -> str:
    """Write a config as YAML that `load` reads back as an equal config.

    Args:
        only_set: Omit fields that were not set.
    """
    return yaml.dump(
        config.model_dump(mode="json", exclude_unset=only_set),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=100,
    )


def flat(value: object, prefix: str = "") -> Json:
    """Flatten nested mappings, joining keys with dots."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    inner = (flat(v, f"{prefix}.{k}" if prefix else str(k)) for k, v in value.items())
    return {key: item for part in inner for key, item in part.items()}


def locations(config: Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each `Location` and `Path` of a config."""
    for name, field in type(config).model_fields.items():
        is_opened = OPENED in field.metadata or _is_opened(field.annotation)
        for item in _items(getattr(config, name)):
            if isinstance(item, Config):
                yield from locations(item, f"{prefix}{name}.")
            elif isinstance(item, Path) or (is_opened and isinstance(item, str)):
                yield prefix + name, str(item)


def _is_opened(declared: object) -> bool:
    return declared is OPENED or any(map(_is_opened, get_args(declared)))


def _items(value: object) -> Iterator[Any]:
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(inner, str) or not isinstance(inner, Iterable) or isinstance(inner, Config):
        yield value
        return
    for item in inner:
        yield from _items(item)


def json_schema(cls: type[Config]) -> Json:
    """Return the JSON schema that editors use to complete and check a recipe."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema()}


def _read(path: Path) -> str:
    """Return the text of a file; refuse a file that is too large, empty or not UTF-8."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        near = path / "recipe.yaml" if path.is_dir() else path
        raise ConfigError(
            f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.",
            found=neighbours(near, "*.y*ml") if isinstance(error, OSError) else "",
        ) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"Cannot read {path}: a recipe has at most {MAX_BYTES:,} bytes.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"Cannot read {path}: it is not UTF-8 text.", found=str(error)) from None
    if not text.strip():
        raise ConfigError(f"Cannot read {path}: the file is empty.")
    return text


def _apply(override: str, number: int, parsed: ParsedYaml) -> None:
    """Apply one "section.key=value" to the data, and record its location."""
    label = "--set " + (override if len(override) <= 80 else override[:77] + "...")
    location = SourceLocation(label, override=number)
    name, equals, text = override.partition("=")
    key: Key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        parsed.problems.append(Problem(location, (), "expected section.key=value"))
        return
    if " #" in text and text.lstrip()[:1] not in {"'", '"', "[", "{"}:
        message = "' #' begins a comment in YAML; put the value in quotes"
        parsed.problems.append(Problem(location, key, message))
        return
    value = parse(text, lambda line: location)
    if value.problems:
        parsed.problems += [Problem(p.location, key + p.key, p.text) for p in value.problems]
        return
    section: Any = parsed.data
    for depth, part in enumerate(key[:-1], start=1):
        if section.get(part) is None:
            section[part] = {}
            parsed.locations[key[:depth]] = location
        if isinstance(section[part], str) and key[:depth] == SHORT:
            section[part] = {"type": section[part]}
        section = section[part]
        if not isinstance(section, dict):
            message = f"'{dotted(key[:depth])}' is a single value, not a section"
            parsed.problems.append(Problem(location, key, message))
            return
    section[key[-1]] = value.data
    parsed.locations = {k: p for k, p in parsed.locations.items() if k[: len(key)] != key}
    parsed.locations.update({key + k: p for k, p in value.locations.items()} | {key: location})


def _validated(cls: type[C], source: str, parsed: ParsedYaml) -> C:
    problems = list(parsed.problems)
    config: C | None = None
    try:
        config = cls.model_validate(parsed.data)
    except ValidationError as error:
        from peftkit.config.explain import problems_of

        problems += problems_of(cls, error, parsed.data, parsed.locations)
    if problems or config is None:
        problems.sort(key=lambda problem: problem.location.order)
        raise _config_error(source, problems)
    return config


def _config_error(source: str, problems: Iterable[Problem]) -> ConfigError:
    by_text = {str(problem): problem for problem in problems}
    count = f" ({len(by_text)} errors)" if len(by_text) > 1 else ""
    error = ConfigError(f"{source} is not valid{count}.", found=first_few(by_text, _MAX_ERRORS))
    error.lines = tuple(
        (problem.location.line, str(problem._replace(location=SourceLocation(""))))
        for problem in list(by_text.values())[:_MAX_ERRORS]
    )
    return error


def _frozen(value: object, declared: object) -> object:
    """Convert lists to tuples, and strings to paths where the field accepts a Path but no str."""
    options = options_of(declared)
    if isinstance(value, list | tuple):
        inner = next((get_args(o)[0] for o in options if get_origin(o) is tuple), None)
        return tuple(_frozen(item, inner) for item in value)
    if isinstance(value, Mapping):
        inner = next((get_args(o)[1] for o in options if get_origin(o) in (dict, Mapping)), None)
        return {key: _frozen(item, inner) for key, item in value.items()}
    if isinstance(value, str) and value and Path in options and str not in options:
        return Path(value)
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes strings that the YAML 1.2 core schema would read as a number, boolean or null."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        if not isinstance(plain_value(data), str):
            return self.represent_scalar("tag:yaml.org,2002:str", data, style="'")
        if not data.isprintable():  # PyYAML drops some of these in other styles
            return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')
        return super().represent_str(data)


_Dumper.add_representer(str, _Dumper.represent_str)
