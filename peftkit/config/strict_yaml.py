"""YAML for recipes: the core schema of YAML 1.2, and the line of every key.

PyYAML alone reads `2e-4` as text, `yes` as true, and keeps the last of two equal keys. Here `2e-4`
is a number, only `true` and `false` are booleans, and a duplicate key, an anchor, an alias or a tag
is an error with its line. All errors of a file are collected, not only the first. Values are built
from the parser's events, so that no tag creates an object and no alias expands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

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


class _Unreadable(Exception):
    """Stop reading; the error has been noted."""


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
    if odd := _ODD_BREAK.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        words = f"character U+{ord(odd[0]):04X} is a line break to some readers; remove it"
        return ParsedYaml(problems=[Problem(place(line), (), words)], readable=False)
    reader = _Reader(yaml.parse(text, Loader=yaml.SafeLoader), place)
    try:
        reader.parsed.data = reader.document()
    except _Unreadable:
        reader.parsed.readable = False
    except yaml.YAMLError as error:
        line, words = _explain(error, text)
        reader.parsed.problems.append(Problem(place(line), (), words))
        reader.parsed.readable = False
    return reader.parsed


class _Reader:
    """Builds values out of parser events."""

    def __init__(
        self, events: Iterator[yaml.Event], place: Callable[[int], SourceLocation]
    ) -> None:
        self.events, self.place = events, place
        self.parsed = ParsedYaml()
        self.num_values = 0

    def document(self) -> object:
        next(self.events)  # the stream starts
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return None
        value = self.value(next(self.events), (), 0)
        next(self.events)  # the document ends
        if not isinstance(extra := next(self.events), yaml.StreamEndEvent):
            self.note(extra, (), "a second document begins ('---'); keep one to a file")
        return value

    def note(self, event: yaml.Event, key: Key, text: str) -> None:
        self.parsed.problems.append(Problem(self.place(_line(event)), key, text))

    def value(self, event: yaml.Event, key: Key, depth: int) -> object:
        self.num_values += 1
        if depth > MAX_DEPTH or self.num_values > MAX_VALUES:
            deep = f"nested deeper than {MAX_DEPTH} levels"
            many = f"more than {MAX_VALUES:,} values"
            self.note(event, key[:3], deep if depth > MAX_DEPTH else many)
            raise _Unreadable
        self.parsed.places.setdefault(key, self.place(_line(event)))
        if isinstance(event, yaml.AliasEvent):
            self.note(event, key, f"alias '*{event.anchor}'; write the value out instead")
            return None
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.anchor is not None:
            self.note(event, key, f"anchor '&{event.anchor}'; write values out where needed")
        if event.tag is not None:
            self.note(event, key, f"tag '{event.tag}'; tags are not accepted, remove it")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(key, depth)
        if isinstance(event, yaml.ScalarEvent):
            return plain_value(event.value) if event.implicit[0] else event.value
        return self.sequence(key, depth)

    def sequence(self, key: Key, depth: int) -> list[object]:
        items: list[object] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.value(event, (*key, len(items)), depth + 1))
        return items

    def mapping(self, key: Key, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            name = self.name(event, key, depth)
            if name in lines:
                words = f"is given twice, first at line {lines[name]}; keep one"
                self.note(event, (*key, name), words)
            lines.setdefault(name, _line(event))
            self.parsed.places[(*key, name)] = self.place(_line(event))
            values[name] = self.value(next(self.events), (*key, name), depth + 1)
        return values

    def name(self, event: yaml.Event, key: Key, depth: int) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            self.note(event, key, "a list, a section or an alias cannot be a key")
            raise _Unreadable
        meaning = self.value(event, (*key, event.value), depth + 1)
        if not isinstance(meaning, str):
            words = f"a key must be text; put it in quotes: '{event.value}'"
            self.note(event, (*key, event.value), words)
        return str(event.value)


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return int(event.start_mark.line) + 1


def _explain(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the line and plain words for what PyYAML could not read."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return line, f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return 1, f"not valid YAML: {error}"
    mark, problem = error.problem_mark, error.problem or ""
    opened = error.context_mark.line + 1 if error.context_mark else mark.line + 1
    line_text = [*text.splitlines(), ""][min(mark.line, text.count("\n"))]
    char = line_text[mark.column : mark.column + 1]
    if char == "\t":
        words = "a tab; YAML takes spaces only, indent with spaces"
    elif "cannot start any token" in problem:
        words = f"a value cannot begin with '{char}'; put it in quotes"
    elif "mapping values are not allowed" in problem:
        words = (
            "a ':' too many, or an indentation unlike the lines around it; "
            "put text that holds ': ' in quotes"
        )
    elif "flow sequence" in (error.context or ""):
        words = f"the list opened with '[' at line {opened} has no ',' or ']' here"
    elif "flow mapping" in (error.context or ""):
        words = f"the section opened with '{{' at line {opened} has no ',' or '}}' here"
    elif "quoted scalar" in (error.context or "") and "end of stream" in problem:
        return opened, "the quote opened on this line is never closed"
    elif "<block end>" in problem:
        words = "this line's indentation does not fit the lines above it"
    elif "could not find expected ':'" in problem:
        return opened, "a key without ':'"
    else:
        words = f"not valid YAML: {error.context or ''} {problem}".replace("  ", " ")
    return mark.line + 1, words
