"""Rows whose text holds images, sounds or videos: where these come from, and where they stand.

| an image, likewise a sound or a video | where it stands                                        |
| {"type": "image", "image": ...}       | there, in a message's content (also url, path, data)   |
| {"type": "image"}                     | there; it is the next one of the row's `images`        |
| the mark <image> in a text (LLaVA)    | there; likewise                                        |
| of `image` or `images`, and no mark   | at the beginning of the first question                 |

What the types, fields and keys are called says each kind of media; <audio> and <video> are marks
where the row has a field of them. After that a row's format is found by its fields as that of any
row: see format.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from peftkit.data.format import (
    QUESTIONS,
    TURNS,
    Completion,
    Conversation,
    Example,
    Instruction,
    ParsedRow,
    Text,
    first_of,
    parse,
    read_each,
)
from peftkit.data.images import Picture
from peftkit.data.load import FormatName, Record
from peftkit.data.media import Media, media_of
from peftkit.data.media_row import KINDS
from peftkit.data.messages import WrongField, kind_of, text_of
from peftkit.errors import DataError

MARKS = {kind.mark: kind for kind in KINDS}
"""What stands for media in the texts of an example."""
ANY_MARK = re.compile(f"([{''.join(MARKS)}])")
_FIELDS = {name for kind in KINDS for name in kind.fields}
_SOURCES = ("url", "path", "base64", "data")
"""Keys of a part, one of which may hold what it is; its types are keys as well."""
_TEXTS = ("text", "input_text", "output_text")
_LISTS = (*TURNS, "prompt", "completion")
"""Fields that may be lists of messages."""


def parse_with_media(
    records: Sequence[Record], name: Literal["auto"] | FormatName, *, where: str
) -> tuple[ParsedRow, list[tuple[Media, ...]]]:
    """Give every record its meaning, as `peftkit.data.format.parse` does, and find its media.

    Returns:
        Examples whose texts have the mark of its kind where a medium stands; and each one's media,
        in that order.

    Raises:
        DataError: With file, line and field of the first few rows that cannot be used.
    """

    def read(record: Record) -> tuple[tuple[Record, tuple[Media, ...]], set[str]]:
        row = _Row(record, where)
        return (row.told(), tuple(row.media)), set()

    found, _ = read_each(records, read, "media in text", where)
    parsed = parse([told for told, _ in found], name, where=where)
    for example in parsed.examples:
        try:
            _check(example)
        except WrongField as problem:
            raise DataError(f"Cannot use {example.source}: {problem}.") from None
    return parsed, [media for _, media in found]


def marks_in(text: str) -> int:
    """Return how many media stand in a text of an example."""
    return len(ANY_MARK.findall(text))


class _Listed:
    """What a row has of one kind of media, beside its messages.

    Attributes:
        field: Where. values: What is there. num_taken: How many of them have been placed.
    """

    def __init__(self, kind: type[Media], fields: Mapping[str, Any]) -> None:
        names = [name for name in kind.fields if fields.get(name)]
        if len(names) > 1:
            words = f"the row has {names[0]} as well; leave one of them out"
            raise WrongField(names[1], words)
        self.field = names[0] if names else kind.fields[0]
        values = fields.get(self.field) or []
        self.values = values if isinstance(values, list | tuple) else [values]
        self.num_taken = 0


class _Row:
    """One record on its way to a record of texts alone.

    Attributes:
        media: In the order of their marks.
    """

    def __init__(self, record: Record, where: str) -> None:
        self._record, self._where = record, where
        self.media: list[Media] = []
        self._listed = {kind: _Listed(kind, record.fields) for kind in KINDS}
        # <audio> and <video> are words of HTML too
        shown = [k for k, listed in self._listed.items() if listed.values or k is Picture]
        self._shown = {f"<{kind.name}>": kind for kind in shown}
        self._any_shown = re.compile("(" + "|".join(self._shown) + ")")

    def told(self) -> Record:
        """Return the record with a mark for each medium and without the media themselves."""
        fields = {k: v for k, v in self._record.fields.items() if k not in _FIELDS}
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = self._marked(value, name)
            elif name in _LISTS and isinstance(value, list):
                fields[name] = [self._turn(turn, f"{name}[{n}]") for n, turn in enumerate(value)]
        for kind, listed in reversed(self._listed.items()):
            if listed.values and not any(isinstance(one, kind) for one in self.media):
                own, self.media = self.media, []
                lead = "".join(self._next(kind, listed.field) for _ in listed.values)
                self.media += own
                fields = _begun_with(lead, fields, listed.field)
        for kind, listed in self._listed.items():
            if listed.num_taken != len(listed.values):
                words = f"{len(listed.values)} {kind.kind}s, and {listed.num_taken} marks in the"
                raise WrongField(listed.field, f"{words} text")
        return Record(fields, self._record.source)

    def _turn(self, turn: Any, path: str) -> Any:
        key = "value" if isinstance(turn, Mapping) and "from" in turn else "content"
        if not isinstance(turn, Mapping) or key not in turn:
            return turn  # whatever is wrong with it, `parse` says it
        value = turn[key]
        if isinstance(value, str):
            return {**turn, key: self._marked(value, f"{path}.{key}")}
        if not isinstance(value, list):
            return turn
        parts = [self._part(part, f"{path}.{key}[{n}]") for n, part in enumerate(value)]
        return {**turn, key: "".join(parts)}

    def _part(self, part: Any, path: str) -> str:
        if isinstance(part, str):
            return self._marked(part, path)
        if not isinstance(part, Mapping):
            raise WrongField(path, f"expected an object, found {kind_of(part)}")
        name = part.get("type")
        if name in _TEXTS:
            return self._marked(text_of(part, "text", f"{path}.text"), path)
        kind = next((kind for kind in KINDS if name in kind.parts), None)
        if kind is None:
            read = ", ".join(f"{kind.kind}s" for kind in KINDS)
            raise WrongField(path, f"only text, {read} can be read, found {name!r}")
        keys = (*kind.parts, *_SOURCES)
        key = next((name for name in keys if part.get(name) is not None), None)
        if key is None:
            return self._next(kind, path)
        value = part[key]
        if isinstance(value, Mapping) and ("url" in value or "data" in value):  # OpenAI's
            key, value = next((k, value[k]) for k in ("url", "data") if k in value)
        if key in ("base64", "data") and isinstance(value, str) and not value.startswith("data:"):
            value = f"data:{kind.name};base64,{value}"
        return self._add(kind, value, f"{path}.{key}")

    def _marked(self, text: str, path: str) -> str:
        if found := ANY_MARK.search(text):
            raise WrongField(path, f"it holds {found[1]!a}, which stands for a medium here")
        return "".join(
            self._next(self._shown[piece], path) if piece in self._shown else piece
            for piece in self._any_shown.split(text)
        )

    def _next(self, kind: type[Media], path: str) -> str:
        """Take the next of those that the row lists."""
        listed = self._listed[kind]
        if listed.num_taken >= len(listed.values):
            words = f"a mark for {kind.kind} {listed.num_taken + 1}, and the row has"
            raise WrongField(path, f"{words} {len(listed.values)}")
        listed.num_taken += 1
        number = listed.num_taken - 1
        return self._add(kind, listed.values[number], f"{listed.field}[{number}]")

    def _add(self, kind: type[Media], value: Any, path: str) -> str:
        number = sum(isinstance(one, kind) for one in self.media) + 1
        found = media_of(kind, value, self._record, self._where, f"{kind.kind} {number}")
        if found is None:
            told = kind_of(value) if isinstance(value, str | list | dict | None) else "a value"
            words = f"expected a path, a data URL or bytes of {kind.kind} {number}, found {told}"
            raise WrongField(path, words)
        self.media.append(found)
        return kind.mark


def _begun_with(lead: str, fields: dict[str, Any], field: str) -> dict[str, Any]:
    """Put media at the beginning of the first thing that the user says."""
    key = first_of(fields, [name for name in _LISTS if isinstance(fields.get(name), list)])
    if key is None:
        question = first_of(fields, ("prompt", *QUESTIONS))
        if question is None or not isinstance(fields[question], str):
            raise WrongField(field, f"there is no question or prompt that the {field} belong to")
        return {**fields, question: lead + fields[question]}
    turns = list(fields[key])
    for number, turn in enumerate(turns):
        text = "value" if isinstance(turn, Mapping) and "from" in turn else "content"
        if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in ("user", "human"):
            turns[number] = {**turn, text: lead + str(turn.get(text) or "")}
            return {**fields, key: turns}
    raise WrongField(key, f"there is no user turn that the {field} belong to")


def _check(example: Example) -> None:
    """Refuse media where none can be, and rows that ask nothing."""
    if isinstance(example, Conversation):
        for number, message in enumerate(example.messages):
            found = ANY_MARK.search(message.get("content") or "")
            if found and message["role"] in ("system", "assistant"):
                words = f"{MARKS[found[1]].kind}s in a {message['role']} message"
                raise WrongField(f"messages[{number}]", f"{words}; a user's may hold some")
    elif isinstance(example, Text):
        raise WrongField("text", "a text alone; give a question and its answer")
    elif isinstance(example, Instruction | Completion):
        answer = example.output if isinstance(example, Instruction) else example.completion
        if found := ANY_MARK.search(answer):
            words = f"{MARKS[found[1]].kind}s in the answer; only the question may hold some"
            raise WrongField("", words)
