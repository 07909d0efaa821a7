"""YAML for recipes: the core schema of YAML 1.2, and the line of every key.

PyYAML alone reads `2e-4` as text, `yes` as true, and keeps the last of two equal keys. Here `2e-4`
is a number, only `true` and `false` are booleans, and a duplicate key, an anchor, an alias or a tag
is an error with its line. All errors of a file are collected, not only the first. Values are read
from PyYAML's nodes: no tag creates an object, no alias expands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

Key = tuple[str | int, ...]
"""Path of a value in the data: ("train", "epochs"), ("method", "targets", 0)."""

MAX_DEPTH = 50
MAX_VALUES = 100_000  # PyYAML reads about 50,000 values a second

_NULLS = {"", "~", "null", "Null", "NULL"}
_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = {"0o": (8, re.compile(r"0o[0-7]+")), "0x": (16, re.compile(r"0x[0-9a-fA-F]+"))}
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_ODD_BREAK = re.compile("[\x85\u2028\u2029]")  # YAML 1.1 breaks lines here, 1.2 does not
_ALIAS = "alias"
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

    place: SourceLocation
    key: Key
    text: str

    def __str__(self) -> str:
        parts = (str(self.place), dotted(self.key), self.text)
        return printable(": ".join(part for part in parts if part))


@dataclass(slots=True)
class ParsedYaml:
    """What was read. `readable` is False if the text is not YAML; `data` is then None."""

    data: object = None
    places: dict[Key, SourceLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True


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


def parse(text: str, place: Callable[[int], SourceLocation]) -> ParsedYaml:
    """Read one YAML document, noting every problem instead of raising at the first.

    Args:
        place: Maps a line number, from 1, to the place to name in a problem.
    """
    found = ParsedYaml()
    if odd := _ODD_BREAK.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        words = f"character U+{ord(odd[0]):04X} is a line break to some readers; remove it"
        found.problems.append(Problem(place(line), (), words))
        found.readable = False
        return found
    loader = None
    try:
        loader = _Loader(text)  # which looks at all characters
        node = loader.get_single_node()
        found.data = None if node is None else _value(node, (), found, place)
    except yaml.MarkedYAMLError as error:
        found.problems.append(Problem(place(_line(error.problem_mark)), (), _told(error)))
        found.readable = False
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        words = f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
        found.problems.append(Problem(place(line), (), words))
        found.readable = False
    refused = loader.refused if loader else []
    found.problems += [Problem(place(line), (), words) for line, words in refused]
    return found


def written_values(text: str) -> list[str]:
    """Return the values between commas, each as it is written; none if they are not YAML."""
    try:
        listed = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    nodes = listed.value if isinstance(listed, yaml.SequenceNode) else []
    return [text[node.start_mark.index - 1 : node.end_mark.index - 1] for node in nodes]


def _told(error: yaml.MarkedYAMLError) -> str:
    """Return PyYAML's words, with the line where what it was reading began."""
    opened = error.context_mark
    context = f"{error.context} from line {_line(opened)}" if opened else error.context
    return f"not valid YAML: {': '.join(filter(None, (context, error.problem)))}"


def _line(mark: yaml.Mark | None) -> int:
    return int(mark.line) + 1 if mark else 1


class _Loader(yaml.SafeLoader):
    """Composes nodes; notes anchors, aliases and tags, and stops where a file is too large."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.refused: list[tuple[int, str]] = []
        self._depth = self._num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        mark: Any = event.start_mark
        line, anchor, tag = _line(event.start_mark), event.anchor, getattr(event, "tag", None)
        self._num_values += 1
        if self._depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            words = f"nested deeper than {MAX_DEPTH} levels or more than {MAX_VALUES:,} values"
            raise yaml.composer.ComposerError(None, None, words, event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            self.get_event()
            self.refused.append((line, f"alias '*{anchor}'; write the value out instead"))
            return yaml.ScalarNode(_ALIAS, "", mark, mark)
        if anchor is not None:
            self.refused.append((line, f"anchor '&{anchor}'; write values out where needed"))
            event.anchor = None
        if tag is not None:
            self.refused.append((line, f"tag '{tag}'; tags are not accepted, remove it"))
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _value(
    node: yaml.Node, key: Key, found: ParsedYaml, place: Callable[[int], SourceLocation]
) -> object:
    """Return what a node means; notes where each key of it was written."""
    found.places.setdefault(key, place(_line(node.start_mark)))
    if isinstance(node, yaml.ScalarNode):
        return plain_value(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*key, n), found, place) for n, item in enumerate(node.value)]
    values: dict[str, object] = {}
    for name, inner in node.value:
        line = _line(name.start_mark)
        if not isinstance(name, yaml.ScalarNode) or name.tag == _ALIAS:
            words = "a list, a section or an alias cannot be a key"
            found.problems.append(Problem(place(line), key, words))
            found.readable = False
            continue
        own = (*key, name.value)
        if name.style is None and not isinstance(plain_value(name.value), str):
            words = f"a key must be text; put it in quotes: '{name.value}'"
            found.problems.append(Problem(place(line), own, words))
        if name.value in values:
            words = f"is given twice, first at line {found.places[own].line}; keep one"
            found.problems.append(Problem(place(line), own, words))
        found.places[own] = place(line)
        values[name.value] = _value(inner, own, found, place)
    return values
