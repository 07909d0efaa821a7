"""Rows of prompts, and the groups of answers that a step learns from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from peftkit.data.encode import Style, prompt_ids
from peftkit.data.load import Record
from peftkit.data.pack import IGNORE, Row
from peftkit.data.prompts import PromptExample, read_prompts
from peftkit.data.rows import Dropped, EncodedRows, RowEncoder, tokenizer_key


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked.

    Attributes:
        asked: Text or messages, as JSON.
        reference: The row's own answer, where it has one.
        known: All fields of its record, as JSON: reward functions get them as columns.
    """

    input_ids: tuple[int, ...]
    asked: str
    reference: str | None
    known: str
    source: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its record."""
        return dict(json.loads(self.known))


@dataclass(slots=True, eq=False)
class Group:
    """A prompt and those of its answers that are learnt from.

    Attributes:
        answers: Tokens of each, with the one that ended it.
        advantages: Of each answer.
        old, reference: Log-probabilities of all their tokens, where a loss asks for them.
    """

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    advantages: tuple[float, ...]
    source: str
    old: Tensor | None = None
    reference: Tensor | None = None

    @property
    def documents(self) -> list[Row]:
        """Each answer after the prompt, as a row."""
        n = len(self.prompt)
        return [
            Row(self.prompt + ids, (IGNORE,) * n + ids, (n + len(ids),), self.source)
            for ids in self.answers
        ]

    @property
    def input_ids(self) -> tuple[int, ...]:
        """All tokens, the prompt once."""
        return self.prompt + tuple(token for answer in self.answers for token in answer)


class PromptEncoder(RowEncoder):
    """Makes a prompt of each record; one that leaves no room for an answer is dropped."""

    kind: ClassVar[type[Prompt]] = Prompt
    drops: Mapping[str, str] = {"no room for an answer": "raise data.max_length"}

    def __init__(self, tokenizer: Any, style: Style, max_prompt: int) -> None:
        self._tokenizer, self._style, self._max_prompt = tokenizer, style, max_prompt

    def key(self, where: str) -> object:
        style = (self._style.kind, self._style.chat_template)
        return (*tokenizer_key(self._tokenizer), *style, self._max_prompt)

    def read(self, records: Sequence[Record], where: str) -> list[tuple[PromptExample, str]]:
        found, _ = read_prompts(records, where=where)
        known = (json.dumps(record.fields, default=str) for record in records)
        return list(zip(found, known, strict=True))

    def rows(self, read: list[tuple[PromptExample, str]]) -> EncodedRows:
        rows: list[Prompt | Dropped] = []
        for one, known in read:
            ids = tuple(prompt_ids(self._tokenizer, one.prompt, self._style, one.tools))
            if len(ids) > self._max_prompt:
                rows.append(Dropped(one.source, 0))
            else:
                asked = json.dumps(one.prompt, default=str)
                rows.append(Prompt(ids, asked, one.reference, known, one.source))
        return EncodedRows(rows, {"style": self._style.kind}, Counter())
