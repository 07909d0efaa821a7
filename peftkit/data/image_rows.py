"""Rows whose text holds images: where the images come from, and where in the text they stand.

| an image                            | where it stands                                          |
| {"type": "image", "image": ...}     | there, in a message's content (also image_url, path, url) |
| {"type": "image"}                   | there; it is the next one of the row's `images`          |
| the mark <image> in a text (LLaVA)  | there; likewise                                          |
| of `image` or `images`, and no mark | at the beginning of the first question                   |

After that a row's format is found by its fields as that of any row: see format.py.
"""

from __future__ import annotations

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
from peftkit.data.images import Picture, picture
from peftkit.data.load import FormatName, Record
from peftkit.data.messages import WrongField, kind_of, text_of
from peftkit.errors import DataError

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for an image in the texts of an example."""
LLAVA_MARK = "<image>"
FIELDS = ("images", "image")
_SOURCES = ("image", "image_url", "url", "path", "base64")
"""Keys of an image part, one of which may hold the image."""
_IMAGES = ("image", "image_url", "input_image")
_TEXTS = ("text", "input_text", "output_text")
_LISTS = (*TURNS, "prompt", "completion")
"""Fields that may be lists of messages."""


def parse_with_images(
    records: Sequence[Record], name: Literal["auto"] | FormatName, *, where: str
) -> tuple[ParsedRow, list[tuple[Picture, ...]]]:
    """Give every record its meaning, as `peftkit.data.format.parse` does, and find its images.

    Returns:
        Examples whose texts have MARK where an image stands; and each one's images, in that order.

    Raises:
        DataError: With file, line and field of the first few rows that cannot be used.
    """

    def read(record: Record) -> tuple[tuple[Record, tuple[Picture, ...]], set[str]]:
        row = _Row(record, where)
        return (row.told(), tuple(row.pictures)), set()

    found, _ = read_each(records, read, "images in text", where)
    parsed = parse([told for told, _ in found], name, where=where)
    for example in parsed.examples:
        try:
            _check(example)
        except WrongField as problem:
            raise DataError(f"Cannot use {example.source}: {problem}.") from None
    return parsed, [pictures for _, pictures in found]


class _Row:
    """One record on its way to a record of texts alone.

    Attributes:
        pictures: In the order of their marks.
    """

    def __init__(self, record: Record, where: str) -> None:
        self._record, self._where = record, where
        self.pictures: list[Picture] = []
        names = [name for name in FIELDS if record.fields.get(name)]
        if len(names) > 1:
            raise WrongField("image", "the row has images as well; leave one of them out")
        self._field = names[0] if names else FIELDS[0]
        listed = record.fields.get(self._field) or []
        self._listed = listed if isinstance(listed, list | tuple) else [listed]
        self._num_taken = 0

    def told(self) -> Record:
        """Return the record with a mark for each image and without the images themselves."""
        fields = {k: v for k, v in self._record.fields.items() if k not in FIELDS}
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = self._marked(value, name)
            elif name in _LISTS and isinstance(value, list):
                fields[name] = [self._turn(turn, f"{name}[{n}]") for n, turn in enumerate(value)]
        if self._listed and not self._num_taken and not self.pictures:
            lead = "".join(self._next(self._field) for _ in self._listed)
            fields = _begun_with(lead, fields, self._field)
        if self._num_taken != len(self._listed):
            raise WrongField(
                self._field, f"{len(self._listed)} images, and {self._num_taken} marks in the text"
            )
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
        kind = part.get("type")
        if kind in _TEXTS:
            return self._marked(text_of(part, "text", f"{path}.text"), path)
        if kind not in _IMAGES:
            raise WrongField(path, f"only text and images can be read, found {kind!r}")
        key = next((name for name in _SOURCES if part.get(name) is not None), None)
        if key is None:
            return self._next(path)
        value = part[key]
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if key == "base64" and isinstance(value, str):
            value = f"data:image;base64,{value}"
        return self._add(value, f"{path}.{key}")

    def _marked(self, text: str, path: str) -> str:
        if MARK in text:
            raise WrongField(path, f"it holds {MARK!a}, which stands for an image here")
        first, *rest = text.split(LLAVA_MARK)
        return first + "".join(self._next(path) + piece for piece in rest)

    def _next(self, path: str) -> str:
        """Take the next of the row's images."""
        if self._num_taken >= len(self._listed):
            raise WrongField(
                path, f"a mark for image {self._num_taken + 1}, and the row has {len(self._listed)}"
            )
        self._num_taken += 1
        number = self._num_taken - 1
        return self._add(self._listed[number], f"{self._field}[{number}]")

    def _add(self, value: Any, path: str) -> str:
        which = f"image {len(self.pictures) + 1}"
        found = picture(value, self._record, self._where, which)
        if found is None:
            kind = kind_of(value) if isinstance(value, str | list | dict | None) else "a value"
            raise WrongField(
                path, f"expected a path, a data URL or bytes of an image, found {kind}"
            )
        self.pictures.append(found)
        return MARK


def _begun_with(lead: str, fields: dict[str, Any], field: str) -> dict[str, Any]:
    """Put images at the beginning of the first thing that the user says."""
    key = first_of(fields, [name for name in _LISTS if isinstance(fields.get(name), list)])
    if key is None:
        question = first_of(fields, ("prompt", *QUESTIONS))
        if question is None or not isinstance(fields[question], str):
            raise WrongField(field, "there is no question or prompt that the images belong to")
        return {**fields, question: lead + fields[question]}
    turns = list(fields[key])
    for number, turn in enumerate(turns):
        text = "value" if isinstance(turn, Mapping) and "from" in turn else "content"
        if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in ("user", "human"):
            turns[number] = {**turn, text: lead + str(turn.get(text) or "")}
            return {**fields, key: turns}
    raise WrongField(key, "there is no user turn that the images belong to")


def _check(example: Example) -> None:
    """Refuse images where none can be, and rows that ask nothing."""
    if isinstance(example, Conversation):
        for number, message in enumerate(example.messages):
            if MARK in (message.get("content") or "") and message["role"] in (
                "system",
                "assistant",
            ):
                raise WrongField(
                    f"messages[{number}]",
                    f"an image in a {message['role']} message; a user's may hold some",
                )
    elif isinstance(example, Text):
        raise WrongField("text", "a text alone; give a question and its answer")
    elif isinstance(example, Instruction | Completion):
        answer = example.output if isinstance(example, Instruction) else example.completion
        if MARK in answer:
            raise WrongField("", "an image in the answer; only the question may hold some")
