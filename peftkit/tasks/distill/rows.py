"""Rows of two documents that end in the same answer: the student's, and the teacher's."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from peftkit.data.cache import tokenizer_key
from peftkit.data.columns import Dropped
from peftkit.data.documents import DocumentEncoder
from peftkit.data.encode import Encoder, Style, prompt_ids, require_template
from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.format import (
    ANSWERS,
    QUESTIONS,
    TURNS,
    Conversation,
    Example,
    Instruction,
    Text,
    first_of,
    parse,
)
from peftkit.data.load import DataConfig, Record
from peftkit.data.messages import Message
from peftkit.data.pack import IGNORE, Learnt, Row, cut_document
from peftkit.errors import DataError
from peftkit.tasks.distill.prompt import TeacherPrompt

NOTHING, BEYOND, TOO_LONG = 0, 1, 2
"""Numbers of `DistillEncoder.drops`."""
OPEN = "\ue000"
"""What stands where a row has no answer, until the teacher has given one."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """An answer after two prompts.

    Args:
        input_ids, labels, lengths: As of a `Row` of two documents, the student's and the teacher's;
            both have the same labels.
        source: "train.jsonl:7".
    """

    input_ids: tuple[int, ...]
    labels: Learnt
    lengths: tuple[int, int]
    source: str

    @property
    def documents(self) -> tuple[Row, Row]:
        """The student's and the teacher's."""
        cut = self.lengths[0]
        return (
            Row(self.input_ids[:cut], self.labels[:cut], (cut,), self.source),
            Row(self.input_ids[cut:], self.labels[cut:], (self.lengths[1],), self.source),
        )


@dataclass(frozen=True, slots=True)
class Question:
    """What both are asked for the last answer of a row.

    Attributes:
        teacher_ids, student_ids: The tokens of the two prompts.
        reference: The file's own answer, where it has one.
    """

    teacher_ids: tuple[int, ...]
    student_ids: tuple[int, ...]
    reference: str | None
    source: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows of a file as conversations."""

    format: str
    conversations: tuple[Conversation, ...]
    unused: tuple[str, ...]


class DistillEncoder(RowEncoder):
    """Makes a row of each record.

    Args:
        limit: The most tokens that the model reads; a longer row of the teacher's is dropped.
        by_teacher: Whether the last answers are the teacher's.

    Attributes:
        answers: The teacher's, by the tokens that it was asked with.
        style: How both are prompted.
    """

    kind: ClassVar[type[Distilled]] = Distilled
    drops: Mapping[str, str] = {
        **DocumentEncoder.drops,
        "too long after the teacher's prompt": "shorten the teacher's prompt",
    }

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        data: DataConfig,
        prompt: TeacherPrompt,
        *,
        max_length: int,
        limit: int,
        by_teacher: bool,
    ) -> None:
        self._tokenizer, self._format = tokenizer, data.format
        self.style = Style("chat", template)
        self._prompt, self._max_length, self._limit = prompt, max_length, limit
        self._by_teacher = by_teacher
        self._encoder = Encoder(tokenizer, template)
        self.answers: dict[tuple[int, ...], str] = {}

    def key(self, where: str) -> object:
        known = (self.style, self._format, self._max_length, self._limit, self._by_teacher)
        said = hashlib.sha256(repr(sorted(self.answers.items())).encode("utf-8", "replace"))
        return (*tokenizer_key(self._tokenizer), *known, self._prompt, said.hexdigest())

    def read(self, records: Sequence[Record], where: str) -> Asked:
        require_template(self._tokenizer, self.style.chat_template)
        given = [with_answer(record) for record in records] if self._by_teacher else records
        found = parse(given, self._format, where=where)
        conversations = tuple(_conversation(example) for example in found.examples)
        return Asked(str(found.format), conversations, found.unused)

    def questions(self, records: Sequence[Record], where: str) -> list[Question]:
        """Return what the teacher is asked for the last answer of each record."""
        found = []
        for row in self.read(records, where).conversations:
            own = tuple(self._ids(row.messages[: _last(row)], row))
            answer = str(row.messages[_last(row)].get("content") or "")
            reference = None if answer == OPEN or not answer.strip() else answer
            found.append(Question(self._teacher_ids(row), own, reference, row.source))
        return found

    def rows(self, read: Asked) -> EncodedRows:
        rows, counts = list[Any](), Counter[str]()
        for row in read.conversations:
            if not self._by_teacher:
                rows.append(self._row(row, counts))
                continue
            ids = self._teacher_ids(row)
            if len(ids) >= self._limit:
                rows.append(Dropped(row.source, TOO_LONG))
            else:
                rows.append(self._row(_answered(row, self.answers.get(ids, "")), counts))
        agreed = {"format": read.format, "style": self.style.kind}
        return EncodedRows(rows, agreed, counts, read.unused)

    def _row(self, example: Conversation, counts: Counter[str]) -> Distilled | Dropped:
        whole = self._encoder.encode(example)
        student = cut_document(whole, self._max_length)
        number = student.num_targets
        if number == 0:
            return Dropped(example.source, BEYOND if whole.num_targets else NOTHING)
        teacher = _first_targets(self._encoder.encode(self._prompt.in_front(example)), number)
        if _targets(teacher) != _targets(student):
            raise DataError(
                f"the answer of {example.source} has other tokens after the teacher's prompt.",
                found="The chat template writes it otherwise there.",
                fix="Set data.chat_template: chatml, or leave the row out.",
            )
        lengths = (len(student.input_ids), len(teacher.input_ids))
        if lengths[1] > self._limit:
            return Dropped(example.source, TOO_LONG)
        counts.update(cut=student is not whole, targets=number)
        counts.update(student_prompts=lengths[0] - number, teacher_prompts=lengths[1] - number)
        ids = student.input_ids + teacher.input_ids
        return Distilled(ids, student.labels + teacher.labels, lengths, example.source)

    def _teacher_ids(self, row: Conversation) -> tuple[int, ...]:
        """Return what the teacher reads before the last answer."""
        return tuple(self._ids(self._prompt.before(row.messages[: _last(row)]), row))

    def _ids(self, messages: Sequence[Message], row: Conversation) -> list[int]:
        return prompt_ids(self._tokenizer, messages, self.style, row.tools)


def with_answer(record: Record) -> Record:
    """Return a record that has an answer, if only one that is left open."""
    fields = dict(record.fields)
    turns = first_of(fields, TURNS)
    question = turns or first_of(fields, ("prompt", *QUESTIONS))
    if question is None:
        return record
    asked = fields[question]
    if turns is not None:
        fields[turns] = _with_turn(asked)
    else:
        answer = first_of(fields, [name for name in ANSWERS if name != question]) or "completion"
        is_open = [{"role": "assistant", "content": OPEN}] if isinstance(asked, list) else OPEN
        fields[answer] = fields.get(answer) or is_open
    return replace(record, fields=fields)


def _with_turn(turns: Any) -> Any:
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, Mapping):
        return turns
    role, content = ("from", "value") if "from" in last else ("role", "content")
    answered = last.get(role) in ("assistant", "gpt")
    return turns if answered else [*turns, {role: "assistant", content: OPEN}]


def _conversation(example: Example) -> Conversation:
    if isinstance(example, Conversation):
        return example
    if isinstance(example, Text):
        raise DataError(
            f"{example.source} asks nothing.",
            found="It is a text (format 'text').",
            fix="Give rows with a prompt, a question or messages.",
        )
    if isinstance(example, Instruction):
        asked, said = example.request, example.output
    else:
        asked, said = example.prompt, example.completion
    turns = ({"role": "user", "content": asked}, {"role": "assistant", "content": said})
    return Conversation(turns, (1,), (), example.source)


def _last(row: Conversation) -> int:
    """Return where the last turn of the assistant is."""
    return max(n for n, turn in enumerate(row.messages) if turn["role"] == "assistant")


def _answered(row: Conversation, answer: str) -> Conversation:
    """Return a conversation that ends in this answer, the only one that is learnt."""
    last = _last(row)
    turn = {"role": "assistant", "content": answer}
    return replace(row, messages=(*row.messages[:last], turn), learnt=(last,))


def _targets(row: Row) -> list[int]:
    return [label for label in row.labels if label != IGNORE]


def _first_targets(row: Row, number: int) -> Row:
    """Return a document up to its so-many-th learnt token."""
    places = [place for place, label in enumerate(row.labels) if label != IGNORE]
    return cut_document(row, places[min(number, len(places)) - 1] + 1) if places else row
