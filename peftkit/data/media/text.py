"""Conversations with images, audio and video: parsing, tokens, and batches of a processor's inputs.

| how a row names an image (or audio, video) | its position and source                           |
| {"type": "image", "image": ...}       | this part of a message's content (also url, path, data) |
| {"type": "image"}                     | this part; the next one of the row's `images`          |
| the mark <image> in a text (LLaVA)    | the mark; the next one of the row's `images`           |
| in `image` or `images`, without marks | at the beginning of the first question                 |

`Media` names the types, fields and keys of each kind; <audio> and <video> are marks only if the row
has a field of them. Without its media, a row has one of the formats of format.py.

There is no table of models: the processor determines the text of a medium, which inputs are
aligned with the tokens, and whether images are nested (media_processor.py). Its tokens replace the
mark in the rendered text, and the target spans shift with them, so that labels are exact. The
processor must make the same tokens of a batch as of its rows: nothing may be cut or moved.

Shapes: B rows, T tokens of the longest row, rounded up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from peftkit.data.chat import Chat, Rendered, Span
from peftkit.data.encode import (
    NOTHING,
    Encoder,
    agreed_style,
    require_template,
    row_of,
)
from peftkit.data.examples import (
    QUESTIONS,
    TURNS,
    Completion,
    Conversation,
    Example,
    Instruction,
    Text,
    first_of,
    with_parsed_cells,
)
from peftkit.data.format import ParsedRow, parse, read_each
from peftkit.data.media.files import ANY_MARK, KINDS, MARKS, Media, Picture, media_of
from peftkit.data.media.processor import MediaProcessor, MediaTemplate, ReadMedia, expanded
from peftkit.data.messages import Message, WrongField, kind_of, role_of, text_of, turn_keys
from peftkit.data.pack import IGNORE, Row, cut_document
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.encoder import RowEncoder, tokenizer_key
from peftkit.data.style import Style
from peftkit.data.tokens import num_common, special_tokens_around
from peftkit.errors import DataError
from peftkit.settings import FormatName


@dataclass(frozen=True, slots=True)
class MediaRow(Row):
    """A row of tokens, and the processor's sources of its other inputs.

    Args:
        text: The processor's input, with the processor's mark for each medium.
        suffix: The target text, for a processor that takes it separately.
        media: The media, in the order of their marks.
        sizes: A readable size of each medium.
        media_tokens: Number of tokens of each medium that the model replaces by features.
        num_patches: Cost of all media in the towers, in tokens of the towers.
        prompt: The text up to the last answer.
    """

    text: str
    suffix: str | None
    media: tuple[Media, ...]
    sizes: tuple[str, ...]
    media_tokens: tuple[int, ...]
    num_patches: int
    prompt: str

    @property
    def documents(self) -> tuple[Row, ...]:
        """The row itself: it is one document, with its media."""
        return (self,)

    def segments(
        self, media_ids: Collection[int], decode: Callable[[list[int]], str]
    ) -> list[tuple[str, str]]:
        """Return (kind, text) segments; the kind is "learnt" for targets, else "".

        A medium is written as its size.

        Args:
            media_ids: Token ids that the model replaces by features of media.
        """
        places: list[tuple[bool, int, str]] = []  # is a target, token, or the text of a medium
        left = [*self.media_tokens]
        for token, label in zip(self.input_ids, self.labels, strict=True):
            number = len(self.media_tokens) - len(left)
            if token not in media_ids:
                if left and left[0] < self.media_tokens[number]:
                    continue  # a line's end, or a tile's, within an image
                places.append((label != IGNORE, token, ""))
                continue
            if left[0] == self.media_tokens[number]:
                plural = "s" if left[0] > 1 else ""
                medium = f"{self.media[number].kind} {self.sizes[number]}"
                places.append((False, -1, f"[{medium}: {left[0]} token{plural}]"))
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
        segments = []
        for is_target, group in groupby(places, key=lambda place: place[0]):
            texts = [
                "".join(text for *_, text in part)
                if is_media
                else decode([token for _, token, _ in part])
                for is_media, part in groupby(group, key=lambda place: bool(place[2]))
            ]
            segments.append(("learnt" if is_target else "", "".join(texts)))
        return segments


_FIELDS = {name for kind in KINDS for name in kind.fields}
_SOURCES = ("url", "path", "base64", "data")
"""Keys of a part that may hold its medium, besides the names of its types."""
_TEXTS = ("text", "input_text", "output_text")
_LISTS = (*TURNS, "prompt", "completion")
"""Fields that may be lists of messages."""


class WithMedia(NamedTuple):
    """An example whose texts have a mark in place of each medium, and its media in order."""

    example: Example
    media: tuple[Media, ...]


def parse_with_media(
    records: Sequence[Record], name: Literal["auto"] | FormatName, *, where: str
) -> ParsedRow[WithMedia]:
    """Make an example of each record, as `peftkit.data.format.parse`, and find its media.

    Raises:
        DataError: With file, line and field of the first few rows that cannot be used.
    """

    def read(record: Record) -> tuple[tuple[Record, tuple[Media, ...]], set[str]]:
        row = _Row(record, where)
        return (row.without_media(), tuple(row.media)), set()

    parsed_cells = [*map(with_parsed_cells, records)]
    pairs = read_each(parsed_cells, read, "media in text", where).examples
    parsed = parse([record for record, _ in pairs], name, where=where)
    for example in parsed.examples:
        try:
            _check(example)
        except WrongField as problem:
            raise DataError(f"Cannot use {example.source}: {problem}.") from None
    examples = tuple(map(WithMedia, parsed.examples, (media for _, media in pairs)))
    return ParsedRow(examples, parsed.unused, parsed.format)


class _Listed:
    """The media of one kind in a field of a row.

    Attributes:
        field: Name of the field.
        values: The media in the field.
        num_taken: Number of media that have been placed.
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
    """Replaces the media of a record by marks.

    Attributes:
        media: The media, in the order of their marks.
    """

    def __init__(self, record: Record, where: str) -> None:
        self._record, self._where = record, where
        self.media: list[Media] = []
        self._listed = {kind: _Listed(kind, record.fields) for kind in KINDS}
        # <audio> and <video> are words of HTML too
        kinds = [k for k, listed in self._listed.items() if listed.values or k is Picture]
        self._shown = {f"<{kind.name}>": kind for kind in kinds}
        self._any_shown = re.compile("(" + "|".join(self._shown) + ")")

    def without_media(self) -> Record:
        """Return the record with a mark in place of each medium."""
        fields = {k: v for k, v in self._record.fields.items() if k not in _FIELDS}
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = self._marked(value, name)
            elif name in _LISTS and isinstance(value, list):
                fields[name] = [self._turn(turn, f"{name}[{n}]") for n, turn in enumerate(value)]
        for kind, listed in reversed(self._listed.items()):
            if listed.values and not any(isinstance(one, kind) for one in self.media):
                others, self.media = self.media, []
                lead = "".join(self._next(kind, listed.field) for _ in listed.values)
                self.media += others
                fields = _begun_with(lead, fields, listed.field)
        for kind, listed in self._listed.items():
            if listed.num_taken != len(listed.values):
                words = f"{len(listed.values)} {kind.kind}s, and {listed.num_taken} marks in the"
                raise WrongField(listed.field, f"{words} text")
        return Record(fields, self._record.source)

    def _turn(self, turn: object, path: str) -> Any:
        if not isinstance(turn, Mapping):
            return turn  # `parse` raises what is wrong with it
        _, key = turn_keys(turn)
        value = turn.get(key)
        if isinstance(value, str):
            return {**turn, key: self._marked(value, f"{path}.{key}")}
        if not isinstance(value, list):
            return turn
        parts = [self._part(part, f"{path}.{key}[{n}]") for n, part in enumerate(value)]
        return {**turn, key: "".join(parts)}

    def _part(self, part: object, path: str) -> str:
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
        if mark := ANY_MARK.search(text):
            raise WrongField(path, f"it holds {mark[1]!a}, reserved as the mark of a medium")
        return "".join(
            self._next(self._shown[segment], path) if segment in self._shown else segment
            for segment in self._any_shown.split(text)
        )

    def _next(self, kind: type[Media], path: str) -> str:
        """Place the next medium that the row lists."""
        listed = self._listed[kind]
        if listed.num_taken >= len(listed.values):
            words = f"a mark for {kind.kind} {listed.num_taken + 1}, and the row has"
            raise WrongField(path, f"{words} {len(listed.values)}")
        listed.num_taken += 1
        number = listed.num_taken - 1
        return self._add(kind, listed.values[number], f"{listed.field}[{number}]")

    def _add(self, kind: type[Media], value: object, path: str) -> str:
        number = sum(isinstance(one, kind) for one in self.media) + 1
        medium = media_of(kind, value, self._record, self._where, f"{kind.kind} {number}")
        if medium is None:
            there = kind_of(value) if isinstance(value, str | list | dict | None) else "a value"
            words = f"expected a path, a data URL or bytes of {kind.kind} {number}, found {there}"
            raise WrongField(path, words)
        self.media.append(medium)
        return kind.mark


def _begun_with(lead: str, fields: dict[str, Any], field: str) -> dict[str, object]:
    """Insert the marks `lead` at the beginning of the user's first text."""
    key = first_of(fields, [name for name in _LISTS if isinstance(fields.get(name), list)])
    if key is None:
        question = first_of(fields, ("prompt", *QUESTIONS))
        if question is None or not isinstance(fields[question], str):
            raise WrongField(field, f"there is no question or prompt that the {field} belong to")
        return {**fields, question: lead + fields[question]}
    turns = list(fields[key])
    for number, turn in enumerate(turns):
        if role_of(turn) == "user":
            _, text = turn_keys(turn)
            turns[number] = {**turn, text: lead + str(turn.get(text) or "")}
            return {**fields, key: turns}
    raise WrongField(key, f"there is no user turn that the {field} belong to")


def _check(example: Example) -> None:
    """Raise WrongField for media outside of prompts, and for rows without a prompt."""
    if isinstance(example, Conversation):
        for number, message in enumerate(example.messages):
            mark = ANY_MARK.search(message.get("content") or "")
            if mark and message["role"] in ("system", "assistant"):
                words = f"{MARKS[mark[1]].kind}s in a {message['role']} message"
                raise WrongField(f"messages[{number}]", f"{words}; a user's may hold some")
    elif isinstance(example, Text):
        raise WrongField("text", "a text alone; give a question and its answer")
    elif isinstance(example, Instruction | Completion):
        answer = example.output if isinstance(example, Instruction) else example.completion
        if mark := ANY_MARK.search(answer):
            words = f"{MARKS[mark[1]].kind}s in the answer; only the question may hold some"
            raise WrongField("", words)


TOO_LONG = "media or the answer beyond the cut"
"""Reason to drop a row; see `RowEncoder.drops`."""


class MediaEncoder(RowEncoder):
    """Encodes examples with media as rows, and rows as a model's inputs.

    No pixels or samples are stored. Each medium is decoded once to find damaged files. Encoding
    runs in one process, because processors use torch, which does not work in forked processes.

    Args:
        needed: The kind of media of the conversations.
        form: The setting data.format.

    Raises:
        DataError: The chat template does not support this kind of media.
    """

    kind: ClassVar[type[MediaRow]] = MediaRow
    in_processes: ClassVar[bool] = False
    at_once: ClassVar[int] = 100
    drops: Mapping[str, str] = {
        NOTHING: "give these rows an answer",
        TOO_LONG: "raise data.max_length or lower data.max_pixels",
    }

    def __init__(
        self,
        media_processor: MediaProcessor,
        needed: type[Media],
        template: str | None,
        form: Any,
        *,
        max_length: int,
    ) -> None:
        self._settings = (template, form, media_processor.limits, max_length)
        self._form, self._max_length, self._needed = form, max_length, needed
        self.media_processor, self._processor = media_processor, media_processor.processor
        self._tokenizer, self.placeholders = self._processor.tokenizer, media_processor.media_ids
        self._template = MediaTemplate(self._processor, media_processor.marks, needed, template)
        self._custom_template = template
        self._chat = Chat(self._tokenizer, self._template.chat_template, self._template)
        self._encoder = Encoder(self._tokenizer, self._template.chat_template)
        self.counts = self._encoder.counts

    def key(self, where: str) -> object:
        folder, processor = str(Path(where).absolute().parent), self._processor
        names = (type(processor).__name__, processor.to_json_string(), processor.chat_template)
        return (folder, *tokenizer_key(processor.tokenizer), *names, *self._settings)

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[WithMedia]:
        return parse_with_media(records, self._form, where=where)

    def example_of(self, example: WithMedia) -> Example:
        return example.example

    def agreed(self, examples: Sequence[Example], form: str) -> dict[str, str]:
        for example in examples:
            agreed_style(self.style_of(examples[0]), self.style_of(example), example.source)
        return super().agreed(examples, form)

    def row(self, example: WithMedia) -> MediaRow | Dropped:
        row = self._cut(self.encode(*example))
        if isinstance(row, MediaRow):
            self.counts.update({"without": not row.media, "targets": row.num_targets})
            for one, number in zip(row.media, row.media_tokens, strict=True):
                self.counts.update({f"{one.kind}s": 1, f"tokens of {one.kind}s": number})
        return row

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        names = {f"rows without {self._needed.kind}s": "without"}
        for kind in KINDS:
            if rows.counts[f"{kind.kind}s"]:
                names |= {name: name for name in (f"{kind.kind}s", f"tokens of {kind.kind}s")}
        return [(name, f"{rows.counts[count]:,}") for name, count in names.items()]

    def _cut(self, row: MediaRow) -> MediaRow | Dropped:
        """Truncate a row to max_length tokens; drop it if that removes media or all targets."""
        if row.num_targets == 0:
            return Dropped(row.source, NOTHING)
        if len(row.input_ids) <= self._max_length:
            return row
        cut = cut_document(row, self._max_length)
        lost = self.media_processor.media_ids.intersection(row.input_ids[self._max_length :])
        if cut.num_targets == 0 or lost:
            return Dropped(row.source, TOO_LONG)
        self.counts["cut"] += 1
        return cut

    def style_of(self, example: Example) -> Style:
        """Return the prompt style for a model that is trained on an example.

        Raises:
            DataError: A conversation needs a chat template, and there is none.
        """
        if isinstance(example, Completion) or (
            self.media_processor.takes_suffix and not self._template.chat_template
        ):
            return Style("plain")
        require_template(self._processor, self._template.chat_template)
        return Style("chat", self._custom_template)

    def encode(self, example: Example, media: Sequence[Media]) -> MediaRow:
        """Return an example's tokens, not truncated; without targets if the answer is empty.

        Raises:
            DataError: A medium cannot be decoded, the template or the processor rejects the row, or
                the targets cannot be located.
        """
        self.media_processor.check(media, example.source)
        if isinstance(example, Instruction):
            example = example.conversation
        if isinstance(example, Conversation) and self.style_of(example).kind == "plain":
            example = _as_completion(example)
        if isinstance(example, Completion):
            return self._completion(example, media)
        assert isinstance(example, Conversation)
        # no target sees what comes after the last one
        targets = example.target_turns
        messages = example.messages[: targets[-1] + 1] if targets else example.messages
        used = sum(len(ANY_MARK.findall(message.get("content") or "")) for message in messages)
        rendered = self._chat.spans(replace(example, messages=messages))
        self._encoder.counts["off_prompt"] += not rendered.as_generated
        return self._row(rendered, media[:used], example.source, ends=True)

    def prompt(self, prompt: str | Sequence[Message], style: Style) -> str:
        """Return the text that generation starts from, with the processor's marks.

        Args:
            prompt: The user's text, or a conversation; with the marks of media.

        Raises:
            DataError: The template cannot render the prompt.
        """
        if style.kind == "plain":
            if not isinstance(prompt, str):
                raise DataError(
                    "Cannot prompt this model with a conversation.",
                    found="Its adapter was trained on single prompts.",
                    fix="Give one prompt as text.",
                )
            return self._begun(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        require_template(self._processor, self._template.chat_template)
        return self._chat.render(style.opened(messages), (), "the prompt", generation=True)

    def prompt_row(self, prompt: str, style: Style, source: str) -> MediaRow:
        """Return a prompt without media as a row without targets."""
        text = self.prompt(prompt, style)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        row = row_of(ids, [False] * len(ids), source)
        return self._with_media(row, (), (), (), 0, (text, text))

    def stop_ids(self, style: Style) -> list[int]:
        """Return the tokens that end an answer: the last target of a row, and eos."""
        eos = self._tokenizer.eos_token_id
        stops = set() if eos is None else {int(eos)}
        if style.kind == "chat":
            hello = Instruction("Hello", "", "Hello", "the chat template")
            stops.add(self.encode(hello, ()).labels[-1])
        return sorted(stops)

    def generation_inputs(self, texts: Sequence[str], media: Sequence[Sequence[Media]]) -> Any:
        """Return the model's inputs for generation from several texts, padded on the left.

        Args:
            media: The media of each text. Either all texts have media of a kind, or none.
        """
        for text, row in zip(texts, media, strict=True):
            self.media_processor.check(row, "the prompt", text)
        read = [self.media_processor.read(row) for row in media]
        inputs = self.media_processor.process(texts, read, "the prompt", padding_side="left")
        return {name: value for name, value in inputs.items() if name != "labels"}

    def inputs(self, rows: Sequence[MediaRow], width: int) -> dict[str, Tensor]:
        """Return the model's inputs except tokens and mask, for rows padded to a width.

        The processor may not get the tokens of an answer. Over these tokens, inputs that are
        aligned with the tokens (B, T, ...) repeat their last value.

        Raises:
            DataError: The processor's tokens of a row differ from the encoded tokens.
        """
        read = [self.media_processor.read(row.media) for row in rows]
        suffix = {"suffix": [row.suffix for row in rows]} if rows[0].suffix is not None else {}
        sources = ", ".join(row.source for row in rows)
        processed = self.media_processor.process(
            [row.text for row in rows], read, sources, padding_side="right", **suffix
        )
        pairs = zip(processed["input_ids"], processed["attention_mask"], strict=True)
        lengths = [
            _num_common(row, ids[mask.bool()].tolist(), self.media_processor.media_ids)
            for row, (ids, mask) in zip(rows, pairs, strict=True)
        ]
        inputs: dict[str, Tensor] = {}
        for name, value in processed.items():
            if name in ("input_ids", "attention_mask", "labels"):
                continue
            if name not in self.media_processor.token_inputs:
                inputs[name] = value
                continue
            aligned = value.new_zeros(len(rows), width, *value.shape[2:])
            for number, (row, common) in enumerate(zip(rows, lengths, strict=True)):
                length = len(row.input_ids)
                aligned[number, :common] = value[number, :common]
                aligned[number, common:length] = value[number, max(common - 1, 0)]
            inputs[name] = aligned
        return inputs

    # ------------------------------------------------------------------- one row

    def _completion(self, example: Completion, media: Sequence[Media]) -> MediaRow:
        if self.media_processor.takes_suffix:
            return self._with_suffix(self._template.bare(example.prompt), example, media)
        prompt = self._begun(example.prompt)
        text = prompt + example.completion
        spans = (Span(len(prompt), len(text), False),) if example.completion.strip() else ()
        return self._row(Rendered(text, spans, True), media, example.source, ends=True)

    def _begun(self, prompt: str) -> str:
        """Return a prompt with the processor's marks after the leading special tokens."""
        if self.media_processor.takes_suffix:
            return self._template.bare(prompt)
        lead, _ = special_tokens_around(self._tokenizer, "a")
        text = "".join(self._tokenizer.convert_ids_to_tokens(lead))
        return text + self._template.bare(prompt)

    def _with_suffix(self, prompt: str, example: Completion, media: Sequence[Media]) -> MediaRow:
        """Encode with a processor that takes the answer separately, as the target segment."""
        processor = self.media_processor
        processor.check(media, example.source, prompt)
        read = processor.read(media)
        inputs = processor.process([prompt], [read], example.source, suffix=[example.completion])
        ids, segments = inputs["input_ids"][0].tolist(), inputs["token_type_ids"][0].tolist()
        is_target = [segment == 1 and bool(example.completion.strip()) for segment in segments]
        row = row_of(ids, is_target, example.source)
        each = sum(token in processor.media_ids for token in ids) // max(len(media), 1)
        tokens, patches = (each,) * len(media), processor.patches(inputs)
        return self._with_media(row, media, read, tokens, patches, (prompt, prompt), example)

    def _row(
        self, rendered: Rendered, media: Sequence[Media], source: str, *, ends: bool
    ) -> MediaRow:
        text, processor = rendered.text, self.media_processor
        processor.check(media, source, text)
        read = processor.read(media)
        replacements, num_patches = processor.replacements(text, read, source)
        whole = expanded(rendered, processor.any_mark, replacements)
        row = self._encoder.rendered(whole, source, ends=ends)
        tokens = processor.tokens_in(replacements)
        number = sum(token in processor.media_ids for token in row.input_ids)
        if sum(tokens) != number or processor.media_ids.intersection(row.labels):
            raise DataError(
                f"Cannot identify the tokens of the media of {source}.",
                found=f"They are {sum(tokens)} tokens, and the row has {number} of that kind.",
                fix=f"Take {' '.join(processor.marks.values())} out of its texts.",
            )
        prompt = text[: rendered.spans[-1].start] if rendered.spans else text
        return self._with_media(row, media, read, tokens, num_patches, (text, prompt))

    def _with_media(
        self,
        row: Row,
        media: Sequence[Media],
        read: ReadMedia,
        tokens: tuple[int, ...],
        num_patches: int,
        texts: tuple[str, str],
        example: Completion | None = None,
    ) -> MediaRow:
        return MediaRow(
            row.input_ids,
            row.labels,
            row.lengths,
            row.source,
            text=texts[0],
            suffix=None if example is None else example.completion,
            media=tuple(media),
            sizes=tuple(kind.describe(one, self.media_processor.limits) for kind, one in read),
            media_tokens=tokens,
            num_patches=num_patches,
            prompt=texts[1],
        )


def _as_completion(example: Conversation) -> Completion:
    """Convert a question and its answer to a completion, for a model without chat template."""
    roles = [message["role"] for message in example.messages]
    if roles != ["user", "assistant"] or example.tools or example.target_turns != (1,):
        raise DataError(
            f"Cannot render the conversation of {example.source} for this base.",
            found="Its processor has no chat template; it takes one prompt and one answer.",
            fix="Give rows of one question and one answer, or set data.chat_template.",
        )
    question, answer = (message.get("content", "") for message in example.messages)
    return Completion(question, answer, example.source)


def _num_common(row: MediaRow, ids: list[int], media_ids: Collection[int]) -> int:
    """Return the length of the common prefix of a row's tokens and the processor's tokens.

    Raises:
        DataError: The tokens differ before the last medium.
    """
    common = num_common(tuple(ids), row.input_ids)
    if any(token in media_ids for token in (*row.input_ids[common:], *ids[common:])):
        raise DataError(
            f"The processor makes other tokens of {row.source} than its text has.",
            found=f"They differ from token {common} on, before its last medium.",
            fix="Take what looks like a special token out of the row, or change the chat template.",
        )
    return common
