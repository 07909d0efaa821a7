"""YAML for recipes: the core schema of YAML 1.2, with the line of every key.

PyYAML reads `2e-4` as text and `yes` as true, and keeps the last of two equal keys. Here `2e-4` is
a number, only `true` and `false` are booleans, and duplicate keys, anchors, aliases and tags are
errors with their line. Values are read from PyYAML's nodes, so no tag creates an object and no
alias expands.
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
_LONGEST_NUMBER = 400  # in characters; Python refuses int() of thousands of digits


class SourceLocation(NamedTuple):
    """Source of a value: a file and line, or the text of the n-th override."""

    label: str
    line: int = 0
    override: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: lines of the file, then overrides."""
        return (self.override, self.line)

    def __str__(self) -> str:
        return f"{self.label}:{self.line}" if self.line else self.label


class Problem(NamedTuple):
    """One error: its source, its key, and the message."""

    location: SourceLocation
    key: Key
    text: str

    def __str__(self) -> str:
        parts = (str(self.location), dotted(self.key), self.text)
        return printable(": ".join(part for part in parts if part))


@dataclass(slots=True)
class ParsedYaml:
    """A parsed document; `data` is None if the text is not YAML."""

    data: object = None
    locations: dict[Key, SourceLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def dotted(key: Key) -> str:
    """Format a key: train.epochs, method.targets[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


def printable(text: str) -> str:
    """Escape unprintable characters, which could move the cursor of a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def plain_value(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar in the YAML 1.2 core schema."""
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
    """Parse one YAML document, and collect the problems of its keys.

    If the text is not YAML, only the first problem is collected.

    Args:
        location: Maps a line number (from 1) to the location in a problem.
    """
    parsed = ParsedYaml()
    try:
        node = StrictLoader(text).get_single_node()
        parsed.data = None if node is None else _value(node, (), parsed, location)
    except yaml.MarkedYAMLError as error:
        opened = error.context_mark
        context = f"{error.context} from line {opened.line + 1}" if opened else error.context
        message = f"not valid YAML: {', '.join(filter(None, (context, error.problem)))}"
        parsed.problems.append(Problem(location(_line(error.problem_mark)), (), message))
    except yaml.YAMLError as error:
        message = f"not valid YAML: {' '.join(str(error).split())}"
        parsed.problems.append(Problem(location(1), (), message))
    except RecursionError:
        parsed.problems.append(Problem(location(1), (), "nested too deeply"))
    return parsed


def written_values(text: str) -> list[str]:
    """Split comma-separated YAML values, without parsing them; [] if they are not YAML."""
    try:
        sequence = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    nodes = sequence.value if isinstance(sequence, yaml.SequenceNode) else []
    return [text[node.start_mark.index - 1 : node.end_mark.index - 1] for node in nodes]


def _line(mark: yaml.Mark | None) -> int:
    return int(mark.line) + 1 if mark else 1


class StrictLoader(yaml.SafeLoader):
    """Composes nodes; refuses anchors, aliases and tags."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        problem = ""
        if event.anchor is not None:  # the name of an alias, too
            problem = f"anchor or alias '{event.anchor}'; write the value out instead"
        elif getattr(event, "tag", None) is not None:
            problem = f"tag '{event.tag}'; tags are not accepted, remove it"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node: Any = super().compose_node(parent, index)
        return node


def _value(
    node: yaml.Node, key: Key, parsed: ParsedYaml, location: Callable[[int], SourceLocation]
) -> object:
    """Return the value of a node, and record the location of each of its keys."""
    parsed.locations.setdefault(key, location(_line(node.start_mark)))
    if isinstance(node, yaml.ScalarNode):
        return plain_value(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*key, n), parsed, location) for n, item in enumerate(node.value)]
    values: dict[str, object] = {}
    for name, inner in node.value:
        line = _line(name.start_mark)
        if not isinstance(name, yaml.ScalarNode):
            problem = "a list or a section cannot be a key"
            raise yaml.composer.ComposerError(None, None, problem, name.start_mark)
        inner_key = (*key, name.value)
        if name.style is None and not isinstance(plain_value(name.value), str):
            message = f"a key must be text; put it in quotes: '{name.value}'"
            parsed.problems.append(Problem(location(line), inner_key, message))
        if name.value in values:
            first = parsed.locations[inner_key].line
            message = f"is given twice, first in line {first}; keep one"
            parsed.problems.append(Problem(location(line), inner_key, message))
        parsed.locations[inner_key] = location(line)
        values[name.value] = _value(inner, inner_key, parsed, location)
    return values
