"""Rows of GRPO: prompts with the fields of their records, and groups of completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from peftkit.data.format import ParsedRow
from peftkit.data.generation import prompt_ids
from peftkit.data.pack import IGNORE, Row
from peftkit.data.prompts import PromptExample, read_prompts
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.encoder import RowEncoder, tokenizer_key
from peftkit.data.style import Style
from peftkit.files.strict_json import Json, JsonMap

NO_ROOM = "no room for an answer"
"""Reason to drop a prompt; see `RowEncoder.drops`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and the fields of its record.

    Attributes:
        content: Text or messages, as JSON.
        reference: The answer in the row, if any.
        record: All fields of the record, as JSON; reward functions get them as columns.
    """

    input_ids: tuple[int, ...]
    content: str
    reference: str | None
    record: str
    source: str

    @property
    def fields(self) -> Json:
        """The fields of the record."""
        return dict(json.loads(self.record))


@dataclass(slots=True, eq=False)
class Group:
    """A prompt and its completions to train on.

    Attributes:
        answers: Tokens of each completion, with its end token.
        advantages: Advantage of each completion.
        sampled: Whether the model sampled each token, for each completion; None: all tokens.
        old, reference: Log-probabilities of the sampled tokens, if the loss needs them.
    """

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    advantages: tuple[float, ...]
    source: str
    sampled: tuple[tuple[bool, ...], ...] | None = None
    old: Tensor | None = None
    reference: Tensor | None = None

    @property
    def documents(self) -> list[Row]:
        """A row for each completion, with the prompt before it."""
        n = len(self.prompt)
        return [
            Row(self.prompt + ids, (IGNORE,) * n + labels, (n + len(ids),), self.source)
            for ids, labels in zip(self.answers, self.labels, strict=True)
        ]

    @property
    def labels(self) -> Sequence[tuple[int, ...]]:
        """The tokens of each completion; IGNORE for tokens of tools and environments."""
        if self.sampled is None:
            return self.answers
        return [
            tuple(
                token if is_target else IGNORE for token, is_target in zip(ids, mask, strict=True)
            )
            for ids, mask in zip(self.answers, self.sampled, strict=True)
        ]

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The prompt, and the tokens of all completions."""
        return self.prompt + tuple(token for answer in self.answers for token in answer)


class PromptEncoder(RowEncoder):
    """Encoder of prompts; drops prompts that leave no room for an answer."""

    kind: ClassVar[type[Prompt]] = Prompt
    drops: Mapping[str, str] = {NO_ROOM: "raise data.max_length"}

    def __init__(
        self,
        tokenizer: Any,
        style: Style,
        max_prompt: int,
        schemas: Callable[[], Sequence[JsonMap]] = tuple,
    ) -> None:
        self._tokenizer, self._style, self._max_prompt = tokenizer, style, max_prompt
        self._schemas = schemas

    @cached_property
    def _tools(self) -> Sequence[JsonMap]:
        return self._schemas()

    def key(self, where: str) -> object:
        style = (self._style.kind, self._style.chat_template)
        return (*tokenizer_key(self._tokenizer), *style, self._max_prompt, json.dumps(self._tools))

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[PromptExample]:
        # rewards may read any field, and rows of several formats have the same prompts
        return read_prompts(records, where=where)._replace(unused=(), format="")

    def row(self, example: PromptExample) -> Prompt | Dropped:
        tools = self._tools or example.tools
        prompt, variables = example.prompt, example.variables
        ids = tuple(prompt_ids(self._tokenizer, prompt, self._style, tools, variables))
        if len(ids) > self._max_prompt:
            return Dropped(example.source, NO_ROOM)
        content, fields = (json.dumps(each, default=str) for each in (prompt, example.fields))
        return Prompt(ids, content, example.reference, fields, example.source)

    def style_of(self, example: PromptExample) -> Style:
        return self._style
