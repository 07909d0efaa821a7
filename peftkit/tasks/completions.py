"""Tasks whose model completes prompts: greedy completions of rows, and their references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch import nn

from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.pack import IGNORE, Row, last_answer, last_answer_span
from peftkit.data.tokens import decoded
from peftkit.events import Sample
from peftkit.forward.batch_layout import BatchLayout
from peftkit.tasks.base import Task
from peftkit.tasks.metrics import exact_match

if TYPE_CHECKING:
    from peftkit.inference.generate import PromptFormat

MARGIN = 1.25
"""Longest completion, relative to the longest reference."""


class Options(TypedDict, total=False):
    """How completions are generated.

    Attributes:
        max_new_tokens: None: by the longest reference of the rows.
        batch_size: Maximum concurrent completions; None: the default.
        on_answer: Called with the number of completions so far.
        on_fewer: Called with the new batch size when memory ran out.
    """

    max_new_tokens: int | None
    batch_size: int | None
    on_answer: Callable[[int], None]
    on_fewer: Callable[[int], None]


class CompletingTask(Task):
    """A mixin of token tasks whose model completes the prompts of rows."""

    layout: BatchLayout

    @property
    def prompt_format(self) -> PromptFormat | None:
        """How the model reads prompts without media; None: as its tokenizer says."""
        return None

    def answers(
        self, model: nn.Module, rows: Sequence[Any], **options: Unpack[Options]
    ) -> list[Sample]:
        """Return the greedy completion of each row's prompt; a row without targets is a prompt.

        Raises:
            RunError: A row does not fit into memory.
        """
        texts = self.completions(model, rows, **options)
        return [
            Sample(self.prompt_text(row), text, self.reference_text(row), row.source)
            for row, text in zip(rows, texts, strict=True)
        ]

    def completions(self, model: Any, rows: Sequence[Any], **options: Unpack[Options]) -> list[str]:
        """Return the text of each completion; see `answers`."""
        from peftkit.inference.generate import generate_ids

        self.layout.forget()
        options["max_new_tokens"] = options.get("max_new_tokens") or longest_answer(rows)
        prompts, stops = map(self._prompt, rows), stop_ids(self.tokenizer, self.rows.prompt_style)
        answers = generate_ids(model, self.tokenizer, [*prompts], stops=stops, **options)
        return [decoded(self.tokenizer, ids) for ids in answers]

    def _prompt(self, row: Any) -> list[int]:
        """Return the tokens of a row before its last answer."""
        return last_answer(self.tokenizer, row)[0] if row.num_targets else list(row.input_ids)

    def prompt_text(self, row: Any) -> str:
        """Return a row's prompt as text."""
        return decoded(self.tokenizer, self._prompt(row)).strip()

    def reference_text(self, row: Any) -> str | None:
        """Return a row's own answer; None if it is a prompt alone."""
        return last_answer(self.tokenizer, row)[1] if row.num_targets else None

    def prompts(self, row: Any) -> Sequence[Any]:
        """Return the documents of a row that end in an answer to a prompt, for `answers`."""
        return [each for each in row.documents if each.labels[0] == IGNORE and each.num_targets]

    def prompt_row(self, model: nn.Module, text: str, where: str) -> Any:
        """Return a prompt as a row without answer; raises DataError if empty or too long."""
        from peftkit.inference.engine import room_left

        ids = prompt_ids(self.tokenizer, text, self.rows.prompt_style)
        room_left(model, [ids], 1)
        return Row(tuple(ids), (IGNORE,) * len(ids), (len(ids),), where)

    def answer_metrics(
        self, pairs: Sequence[tuple[str, str]], rows: Sequence[Any]
    ) -> dict[str, float]:
        """Return metrics of completions.

        Args:
            pairs: Each completion and its reference. rows: The row of each.
        """
        return {"exact_match": exact_match(pairs)}


def longest_answer(rows: Sequence[Row]) -> int:
    """Return the maximum length of a completion in tokens, by the longest reference."""
    lengths = [stop - start for start, stop in map(last_answer_span, rows)]
    return math.ceil(MARGIN * max(lengths))
