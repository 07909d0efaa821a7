"""The teacher's prompt, and rows of a student and a teacher document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from peftkit.data.encode import (
    BEYOND,
    NOTHING,
    DocumentEncoder,
    Encoder,
    require_template,
)
from peftkit.data.examples import Conversation
from peftkit.data.format import ParsedRow
from peftkit.data.generation import prompt_ids
from peftkit.data.messages import Message, WrongField, parse_messages
from peftkit.data.pack import IGNORE, Row
from peftkit.data.prompts import PromptExample, read_prompts
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.columns import StoredRows
from peftkit.data.rows.encoder import RowEncoder
from peftkit.data.rows.lazy import LazyRows, num_tokens
from peftkit.data.style import Style
from peftkit.errors import DataError, neighbours
from peftkit.events import Listener, Notice, Progress
from peftkit.execution import rng
from peftkit.settings import DataConfig
from peftkit.tasks.row_loader import RowLoader

TEXT_ENDINGS = (".md", ".txt")
TURN = re.compile(r"^#+ *(system|user|assistant) *:? *$", re.IGNORECASE | re.MULTILINE)
"""A heading in a text file, followed by a turn of an example."""
_FIX = (
    "Write the instructions as text (.md, .txt), with examples under headings '## User' and "
    "'## Assistant'; or messages with role and content (.json, .jsonl)."
)


@dataclass(frozen=True, slots=True)
class TeacherPrompt:
    """Prompt that precedes each row in the teacher's document.

    Attributes:
        system: Instructions, possibly empty.
        turns: Examples, as alternating user and assistant messages.
    """

    system: str = ""
    turns: tuple[Message, ...] = ()

    @property
    def examples(self) -> list[str]:
        """The user messages of the examples."""
        return [str(turn["content"]) for turn in self.turns if turn["role"] == "user"]

    def before(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Prepend the prompt to a conversation, whose own system message comes second."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        texts = (self.system, messages[0]["content"] if has_system else "")
        rest = messages[1:] if texts[1] else messages
        system = "\n\n".join(text for text in texts if text)
        first: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        return (*first, *self.turns, *rest)


def read_prompt(path: str | Path) -> TeacherPrompt:
    """Read a teacher's prompt: system text, or messages.

    Raises:
        DataError: The file cannot be read, is empty, or has invalid messages.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        detail = str(problem) if file.exists() else neighbours(file, "*")
        raise DataError(f"Cannot read the teacher's prompt {path}.", found=detail) from None
    if file.suffix.lower() not in (*TEXT_ENDINGS, ".json", ".jsonl"):
        raise DataError(
            f"Cannot read the teacher's prompt {path}.",
            found=f"The suffix '{file.suffix}' is not supported.",
            fix=_FIX,
        )
    if not text.strip():
        raise DataError(f"The teacher's prompt {path} is empty.", fix=_FIX)
    try:
        is_text = file.suffix.lower() in TEXT_ENDINGS
        return _of_messages(_of_text(text) if is_text else _of_json(text, file.suffix.lower()))
    except (WrongField, ValueError) as problem:
        raise DataError(
            f"Cannot use the teacher's prompt {path}.", found=str(problem), fix=_FIX
        ) from None


def _of_text(text: str) -> list[Mapping[str, Any]]:
    """Return the messages of a text; text before the first heading is the system message."""
    first, *parts = TURN.split(text)
    named = zip(["system", *parts[::2]], [first, *parts[1::2]], strict=True)
    messages = [{"role": role.lower(), "content": part.strip()} for role, part in named]
    return [message for number, message in enumerate(messages) if number or message["content"]]


def _of_json(text: str, ending: str) -> object:
    lines = [text] if ending == ".json" else [line for line in text.splitlines() if line.strip()]
    values = [json.loads(line) for line in lines]
    value = values[0] if len(values) == 1 else values
    if isinstance(value, Mapping):
        return value.get("messages", [value])
    return value


def _of_messages(messages: object) -> TeacherPrompt:
    if not isinstance(messages, list):
        raise WrongField("", "it is not a list of messages")
    if not messages:
        raise WrongField("", "it has no messages")
    row = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    parsed, _ = parse_messages([*messages, *row], "messages")  # validate them with a row after them
    turns = parsed[: -len(row)]
    for number, message in enumerate(turns):
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise WrongField(f"messages[{number}].content", "empty")
    if turns[0]["role"] == "system":
        return TeacherPrompt(str(turns[0]["content"]).strip(), tuple(turns[1:]))
    return TeacherPrompt("", tuple(turns))


# Rows of two documents, the student's and the teacher's, that end with the same answer.


DEMONSTRATION = (
    "{question}\n\nThis is an example of a response to it:\n{answer}\n\n"
    "Now answer with a response of your own."
)
"""The last message of the teacher's prompt if it shows the row's answer (SDFT)."""
TOO_LONG = "too long after the teacher's prompt"
"""Reason to drop a row; see `RowEncoder.drops`."""


@dataclass(frozen=True, slots=True)
class Distilled(Row):
    """The student's document, then the teacher's: two prompts, and the same answer, if any.

    Args:
        reference: The answer in the data file, if any.
    """

    reference: str | None = None

    @property
    def teacher_ids(self) -> tuple[int, ...]:
        """The teacher's document."""
        return self.input_ids[self.lengths[0] :]

    def answered(self, ids: Sequence[int]) -> Distilled:
        """Return the row with an answer after both prompts."""
        return distilled(self.documents[0].input_ids, self.teacher_ids, ids, self)


def distilled(
    student: Sequence[int],
    teacher: Sequence[int],
    answer: Sequence[int],
    example: PromptExample | Distilled,
) -> Distilled:
    """Return a row of two prompts and an answer."""
    ids, labels, ending = list[int](), list[int](), tuple(answer)
    for prompt in (student, teacher):
        ids += (*prompt, *ending)
        labels += (*[IGNORE] * len(prompt), *ending)
    lengths = (len(student) + len(ending), len(teacher) + len(ending))
    return Distilled(tuple(ids), tuple(labels), lengths, example.source, example.reference)


def without_first(document: Row, number: int) -> Row:
    """Return a document without its first targets, except the last target of all."""
    number = min(number, document.num_targets - 1)
    if number <= 0:
        return document
    labels, start = document.labels, len(document.labels) - document.num_targets
    ignored = [IGNORE] * number
    return replace(document, labels=(*labels[:start], *ignored, *labels[start + number :]))


class DistillEncoder(RowEncoder):
    """Encoder of records as two prompts each, followed by the last answer if rows have answers.

    Args:
        limit: Maximum tokens of the model; rows with longer teacher documents are dropped.
        room: Tokens reserved for an answer that is generated later; None: the rows have answers.
        shows_answer: Whether the teacher's prompt includes the row's answer as an example.
    """

    kind: ClassVar[type[Distilled]] = Distilled
    drops: Mapping[str, str] = {**DocumentEncoder.drops, TOO_LONG: "shorten the teacher's prompt"}

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        data: DataConfig,
        prompt: TeacherPrompt,
        *,
        max_length: int,
        limit: int,
        room: int | None,
        shows_answer: bool = False,
    ) -> None:
        self.style = Style("chat", template)
        self.tokenizer, self._format, self._prompt = tokenizer, data.format, prompt
        self._max_length, self._limit, self._room = max_length, limit, room
        self._encoder, self._shows_answer = Encoder(tokenizer, template), shows_answer
        lengths = (max_length, limit, room)
        self.settings = (self.style, data.format, *lengths, prompt, shows_answer)

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[PromptExample]:
        require_template(self.tokenizer, self.style.chat_template)
        return read_prompts(records, self._format, where=where)

    def row(self, example: PromptExample) -> Distilled | Dropped:
        row = self._row(example)
        if isinstance(row, Distilled):
            if targets := row.num_targets // 2:
                self.counts["targets"] += targets
            for who, length in zip(("student", "teacher"), row.lengths, strict=True):
                self.counts[f"{who}_prompts"] += length - targets
        return row

    def style_of(self, example: PromptExample) -> Style:
        return self.style

    def summary(self, rows: StoredRows) -> list[tuple[str, str]]:
        kept = max(len(rows), 1)
        teacher, student = (rows.counts[f"{who}_prompts"] / kept for who in ("teacher", "student"))
        averages = f"{teacher:,.0f}, {student:,.0f}: {teacher - student:,.0f} saved per request"
        return [("tokens of a prompt, teacher's and student's", averages)]

    def _row(self, example: PromptExample) -> Distilled | Dropped:
        student, teacher = (
            prompt_ids(self.tokenizer, messages, self.style, example.tools, example.variables)
            for messages in (example.messages, self._prompt.before(self._demonstrated(example)))
        )
        if self._shows_answer and not example.reference:
            return Dropped(example.source, NOTHING)
        answer = self._answer(example) if self._room is None else []
        if self._room is None and not answer:
            return Dropped(example.source, NOTHING)
        room = self._max_length - len(student)
        if room <= 0:
            return Dropped(example.source, BEYOND)
        self.counts["cut"] += len(answer) > room
        if len(teacher) + (self._room or min(len(answer), room)) > self._limit:
            return Dropped(example.source, TOO_LONG)
        return distilled(student, teacher, answer[:room], example)

    def _demonstrated(self, example: PromptExample) -> Sequence[Message]:
        """Return the messages of a row for the teacher, with its answer as an example if set."""
        if not (self._shows_answer and example.reference):
            return example.messages
        *before, last = example.messages
        text = DEMONSTRATION.format(question=last["content"], answer=example.reference)
        return (*before, {**last, "content": text})

    def _answer(self, example: PromptExample) -> list[int]:
        """Return the tokens of a row's answer, including its end token."""
        turns = (*example.messages, {"role": "assistant", "content": example.reference or ""})
        target = (len(turns) - 1,)
        whole = Conversation(turns, target, example.tools, example.source, example.variables)
        return [label for label in self._encoder.encode(whole).labels if label != IGNORE]


# Demonstrations of other rows in the teacher's prompt (OP2SD, arXiv:2608.09228).
#
# The encoder stores the messages of each row. After the eval rows are split off, each row gets one
# of the training rows, drawn by seed, as an example conversation before its own.


MAX_DRAWS = 64
"""Training rows that are drawn for a row until one is another row and fits."""
REPORT_EVERY = 500
"""Rows between two reports of progress."""


@dataclass(frozen=True, slots=True)
class StoredPrompt(Distilled):
    """A row with its prompt as text.

    Args:
        prompt: Messages and tools, as JSON.
    """

    prompt: str = ""


class DemonstrationEncoder(DistillEncoder):
    """Encoder of rows whose teacher reads another row as an example."""

    kind: ClassVar[type[Distilled]] = StoredPrompt

    def row(self, example: PromptExample) -> Distilled | Dropped:
        row = super().row(example)
        if isinstance(row, Dropped):
            return row
        prompt = json.dumps([example.messages, example.tools])
        tensors = row.input_ids, row.labels, row.lengths
        return StoredPrompt(*tensors, row.source, row.reference, prompt)

    def demonstrated(self, row: StoredPrompt, other: StoredPrompt) -> Distilled | None:
        """Return a row whose teacher reads another row first; None if that is too long."""
        messages, tools = json.loads(row.prompt)
        turns = [turn for turn in json.loads(other.prompt)[0] if turn["role"] != "system"]
        turns.append({"role": "assistant", "content": other.reference})
        prompt = replace(self._prompt, turns=(*self._prompt.turns, *turns))
        teacher = prompt_ids(self.tokenizer, prompt.before(messages), self.style, tools)
        start = row.lengths[0] - row.num_targets // 2
        student, answer = row.input_ids[:start], row.input_ids[start : row.lengths[0]]
        if len(teacher) + (self._room or len(answer)) > self._limit:
            return None
        return distilled(student, teacher, answer, row)


class WithDemonstrations(LazyRows):
    """Rows whose teacher reads a training row as an example, never the row itself.

    Args:
        pool: The training rows.
        seed: Seed of the draws.

    Raises:
        DataError: No drawn row is another row with an answer and fits into the context.
    """

    def __init__(
        self,
        rows: Sequence[StoredPrompt],
        pool: LazyRows,
        encoder: DemonstrationEncoder,
        seed: int,
        on_event: Listener,
    ) -> None:
        self._rows, self._pool, self._encoder, self._seed = rows, pool, encoder, seed
        lengths, text = [], "Adding demonstrations to the teacher's prompts"
        for place in range(len(rows)):
            if place % REPORT_EVERY == 0:
                on_event(Progress(text, place, len(rows)))
            lengths.append(num_tokens(self.row(place)))
        contents = [getattr(each, "fingerprint", "") for each in (rows, pool)]
        super().__init__(torch.tensor(lengths, dtype=torch.int64), *contents, seed)

    def row(self, place: int) -> Distilled:
        row = self._rows[place]
        for draw in range(MAX_DRAWS):
            other = self._pool[rng.seed_of(self._seed, place, draw) % len(self._pool)]
            if other.reference and other.prompt != row.prompt:
                made = self._encoder.demonstrated(row, other)
                if made is not None:
                    return made
        raise DataError(
            f"task.teacher.answer: other has no demonstration for {row.source}.",
            found=f"None of {MAX_DRAWS} drawn training rows has another prompt, an answer, and "
            "fits into the model's context together with the row.",
            fix="Add training rows with answers, or remove long rows; answer: true shows the "
            "row's own answer.",
        )


class DistillLoader(RowLoader):
    """Reads the rows of distillation.

    Attributes:
        seed: Seed of the demonstrations.
    """

    seed: int = 0

    def load_splits(self, data: DataConfig) -> tuple[LazyRows, Sequence[Any]]:
        rows, held = super().load_splits(data)
        if not isinstance(self.encoder, DemonstrationEncoder):
            return rows, held
        more = rows, self.encoder, self.seed, self.on_event
        shown = WithDemonstrations(rows, *more)
        added = float(shown.num_tokens.sum() - rows.num_tokens.sum()) / max(len(rows), 1)
        text = "The teacher reads another training row before each row"
        self.on_event(Notice(f"{text}: {added:,.0f} tokens more on average."))
        return shown, WithDemonstrations(held, *more) if len(held) else held
