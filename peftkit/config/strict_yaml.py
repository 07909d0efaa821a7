"""YAML for recipes: the core schema of YAML 1.2, and the line of every key.

PyYAML alone reads `2e-4` as text, `yes` as true, and keeps the last of two equal keys. Here `2e-4`
is a number, only `true` and `false` are booleans, and a duplicate key, an anchor, an alias or a tag
is an error with its line. Values are read from PyYAML's nodes: no tag creates an object, no alias
expands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

Key = tuple[str | int, ...]
"""Path of a value in the data: ("train", "epochs"), ("method", "targets", 0)."""

_NULLS = {"", "~", "null", "Null", "NULL"}
_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = {"0o": (8, re.compile(r"0o[0-7]+")), "0x": (16, re.compile(r"0x[0-9a-fA-F]+"))}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER = 400  # characters; int() of thousands of digits is refused by Python itself


class SourceLocation(NamedTuple):
    """Where something was written: a file and line, or the text of the n-th override."""

    label: str
    line: int = 0
    override: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of errors: the file's lines, then the overrides."""
        return (self.override, self.line)

    def __str__(self) -> str:
        return f"{self.label}:{self.line}" if self.line else self.label


class Problem(NamedTuple):
    """One error: where it was written, the key it is about, and the message."""

    location: SourceLocation
    key: Key
    text: str

    def __str__(self) -> str:
        parts = (str(self.location), dotted(self.key), self.text)
        return printable(": ".join(part for part in parts if part))


@dataclass(slots=True)
class ParsedYaml:
    """What was read; `data` is None if the text is not YAML."""

    data: object = None
    locations: dict[Key, SourceLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def dotted(key: Key) -> str:
    """Write a key as users do: train.epochs, method.targets[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


def printable(text: str) -> str:
    """Escape what could move a terminal's cursor: control and other unprintable characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def plain_value(text: str) -> str | int | float | bool | None:
    """Return what an unquoted scalar means in the YAML 1.2 core schema."""
    if text in _NULLS:
        return None
    if text in _TRUTHS:
        return _TRUTHS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    base, pattern = _BASED.get(text[:2], (0, None))
    if pattern and pattern.fullmatch(text):
        return int(text[2:], base)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def parse(text: str, location: Callable[[int], SourceLocation]) -> ParsedYaml:
    """Read one YAML document; a problem of its keys is noted, where it is no YAML the first alone.

    Args:
        location: Maps a line number, from 1, to the location to name in a problem.
    """
    parsed = ParsedYaml()
    try:
        node = _Loader(text).get_single_node()
        parsed.data = None if node is None else _value(node, (), parsed, location)
    except yaml.MarkedYAMLError as error:
        opened = error.context_mark
        context = f"{error.context} from line {opened.line + 1}" if opened else error.context
        words = f"not valid YAML: {', '.join(filter(None, (context, error.problem)))}"
        parsed.problems.append(Problem(location(_line(error.problem_mark)), (), words))
    except yaml.YAMLError as error:
        words = f"not valid YAML: {' '.join(str(error).split())}"
        parsed.problems.append(Problem(location(1), (), words))
    except RecursionError:
        parsed.problems.append(Problem(location(1), (), "nested too deeply"))
    return parsed


def written_values(text: str) -> list[str]:
    """Return the values between commas, each as it is written; none if they are not YAML."""
    try:
        listed = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    nodes = listed.value if isinstance(listed, yaml.SequenceNode) else []
    return [text[node.start_mark.index - 1 : node.end_mark.index - 1] for node in nodes]


def _line(mark: yaml.Mark | None) -> int:
    return int(mark.line) + 1 if mark else 1


class _Loader(yaml.SafeLoader):
    """Composes nodes; refuses anchors, aliases and tags."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if event.anchor is not None:  # of an alias its name
            words = f"anchor or alias '{event.anchor}'; write the value out instead"
            raise yaml.composer.ComposerError(None, None, words, event.start_mark)
        if getattr(event, "tag", None) is not None:
            words = f"tag '{event.tag}'; tags are not accepted, remove it"
            raise yaml.composer.ComposerError(None, None, words, event.start_mark)
        node: Any = super().compose_node(parent, index)
        return node


def _value(
    node: yaml.Node, key: Key, parsed: ParsedYaml, location: Callable[[int], SourceLocation]
) -> object:
    """Return what a node means; notes where each key of it was written."""
    parsed.locations.setdefault(key, location(_line(node.start_mark)))
    if isinstance(node, yaml.ScalarNode):
        return plain_value(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*key, n), parsed, location) for n, item in enumerate(node.value)]
    values: dict[str, object] = {}
    for name, inner in node.value:
        line = _line(name.start_mark)
        if not isinstance(name, yaml.ScalarNode):
            words = "a list or a section cannot be a key"
            raise yaml.composer.ComposerError(None, None, words, name.start_mark)
        inner_key = (*key, name.value)
        if name.style is None and not isinstance(plain_value(name.value), str):
            words = f"a key must be text; put it in quotes: '{name.value}'"
            parsed.problems.append(Problem(location(line), inner_key, words))
        if name.value in values:
            words = f"is given twice, first at line {parsed.locations[inner_key].line}; keep one"
            parsed.problems.append(Problem(location(line), inner_key, words))
        parsed.locations[inner_key] = location(line)
        values[name.value] = _value(inner, inner_key, parsed, location)
    return values
