"""Rows of two documents that end in the same answer: the student's, and the teacher's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from peftkit.data.encode import (
    BEYOND,
    NOTHING,
    DocumentEncoder,
    Encoder,
    Style,
    prompt_ids,
    require_template,
)
from peftkit.data.format import Conversation, ParsedRow
from peftkit.data.load import Record
from peftkit.data.pack import IGNORE, Row
from peftkit.data.prompts import PromptExample, read_prompts
from peftkit.data.rows import Dropped, EncodedRows, RowEncoder, tokenizer_key
from peftkit.settings import DataConfig
from peftkit.tasks.distill.prompt import TeacherPrompt

TOO_LONG = 2
"""Number of the last one of `DistillEncoder.drops`."""
Read = tuple[list[PromptExample], ParsedRow]


@dataclass(frozen=True, slots=True)
class Distilled(Row):
    """The student's document, then the teacher's: two prompts, and the same answer if it is known.

    Args:
        reference: The file's own answer, where it has one.
    """

    reference: str | None = None

    @property
    def teacher_ids(self) -> tuple[int, ...]:
        """The teacher's document."""
        return self.input_ids[self.lengths[0] :]

    def answered(self, ids: Sequence[int]) -> Distilled:
        """Return prompts with an answer after them."""
        return distilled(self.documents[0].input_ids, self.teacher_ids, ids, self)


def distilled(
    student: Sequence[int],
    teacher: Sequence[int],
    answer: Sequence[int],
    asked: PromptExample | Distilled,
) -> Distilled:
    """Return the row of two prompts and an answer."""
    ids, labels, said = list[int](), list[int](), tuple(answer)
    for prompt in (student, teacher):
        ids += (*prompt, *said)
        labels += (*[IGNORE] * len(prompt), *said)
    lengths = (len(student) + len(said), len(teacher) + len(said))
    return Distilled(tuple(ids), tuple(labels), lengths, asked.source, asked.reference)


class DistillEncoder(RowEncoder):
    """Makes two prompts of each record, and takes its last answer if that is asked for.

    Args:
        limit: The most tokens that the model reads; a longer row of the teacher's is dropped.
        room: Tokens of an answer that is made later; None: the rows have theirs.
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
        room: int | None,
    ) -> None:
        self.style = Style("chat", template)
        self._tokenizer, self._format, self._prompt = tokenizer, data.format, prompt
        self._max_length, self._limit, self._room = max_length, limit, room
        self._encoder = Encoder(tokenizer, template)

    def key(self, where: str) -> object:
        known = (self.style, self._format, self._max_length, self._limit, self._room)
        return (*tokenizer_key(self._tokenizer), *known, self._prompt)

    def read(self, records: Sequence[Record], where: str) -> Read:
        require_template(self._tokenizer, self.style.chat_template)
        return read_prompts(records, self._format, where=where)

    def rows(self, read: Read) -> EncodedRows:
        rows, counts, (asked, parsed) = list[Any](), Counter[str](), read
        for one in asked:
            row = self._row(one, counts)
            rows.append(row)
            if isinstance(row, Distilled):
                if targets := row.num_targets // 2:
                    counts["targets"] += targets
                for who, length in zip(("student", "teacher"), row.lengths, strict=True):
                    counts[f"{who}_prompts"] += length - targets
        agreed = {"format": str(parsed.format), "style": self.style.kind}
        return EncodedRows(rows, agreed, counts, parsed.unused)

    def _row(self, asked: PromptExample, counts: Counter[str]) -> Distilled | Dropped:
        student, teacher = (
            prompt_ids(self._tokenizer, messages, self.style, asked.tools)
            for messages in (asked.messages, self._prompt.before(asked.messages))
        )
        answer = self._answer(asked) if self._room is None else []
        if self._room is None and not answer:
            return Dropped(asked.source, NOTHING)
        room = self._max_length - len(student)
        if room <= 0:
            return Dropped(asked.source, BEYOND)
        counts["cut"] += len(answer) > room
        if len(teacher) + (self._room or min(len(answer), room)) > self._limit:
            return Dropped(asked.source, TOO_LONG)
        return distilled(student, teacher, answer[:room], asked)

    def _answer(self, asked: PromptExample) -> list[int]:
        """Return the tokens of a row's own answer, with the one that ends it."""
        turns = (*asked.messages, {"role": "assistant", "content": asked.reference or ""})
        whole = Conversation(turns, (len(turns) - 1,), asked.tools, asked.source)
        return [label for label in self._encoder.encode(whole).labels if label != IGNORE]
