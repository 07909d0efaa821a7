"""Rows of prompts, and the groups of answers that a step learns from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from peftkit.data.cache import tokenizer_key
from peftkit.data.columns import Dropped
from peftkit.data.encode import Style, prompt_ids
from peftkit.data.encoding import EncodedRows, RowEncoder
from peftkit.data.load import Record
from peftkit.data.pack import IGNORE, Row
from peftkit.errors import DataError

REFERENCES = ("answer", "output", "completion", "response", "reference")
"""Fields that may hold what an answer should be; the first that a row has."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked.

    Attributes:
        known: All fields of its record, as JSON: reward functions get them as columns.
    """

    input_ids: tuple[int, ...]
    known: str
    source: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its record."""
        return dict(json.loads(self.known))

    @property
    def reference(self) -> str | None:
        """What its answer should be, where its record says it."""
        fields = self.fields
        found = next((fields[name] for name in REFERENCES if name in fields), None)
        turns = fields.get("messages")
        if found is None and turns and turns[-1]["role"] == "assistant":
            found = turns[-1]["content"]
        return found if found is None or isinstance(found, str) else json.dumps(found)


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

    def read(self, records: Sequence[Record], where: str) -> Sequence[Record]:
        return records

    def rows(self, read: Sequence[Record]) -> EncodedRows:
        rows: list[Prompt | Dropped] = []
        for record in read:
            prompt = asked(record.fields, record.source)
            ids = tuple(prompt_ids(self._tokenizer, prompt, self._style))
            if len(ids) > self._max_prompt:
                rows.append(Dropped(record.source, 0))
            else:
                rows.append(Prompt(ids, json.dumps(record.fields, default=str), record.source))
        return EncodedRows(rows, {"style": self._style.kind}, Counter())


def asked(fields: Mapping[str, Any], source: str) -> Any:
    """Return a record's prompt: text, or messages.

    Raises:
        DataError: It has none.
    """
    if turns := fields.get("messages"):
        return turns[:-1] if turns[-1]["role"] == "assistant" else turns
    for name in ("prompt", "instruction", "question"):
        if found := fields.get(name):
            more = fields.get("input") if name == "instruction" else None
            return f"{found}\n\n{more}" if more else found
    raise DataError(
        f"{source} has no prompt",
        found=f"Its fields: {', '.join(fields)}.",
        fix="Name it prompt (text or messages), instruction, question or messages.",
    )
