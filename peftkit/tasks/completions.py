"""Tasks whose model completes prompts: greedy completions of rows, and their references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.pack import IGNORE, Row
from peftkit.data.row_text import last_answer, last_answer_span
from peftkit.events import Sample
from peftkit.forward.batch_layout import BatchLayout
from peftkit.tasks.base import Task
from peftkit.tasks.metrics import exact_match

if TYPE_CHECKING:
    from peftkit.inference.generate import PromptFormat

MARGIN = 1.25
"""Longest completion, relative to the longest reference."""
OnCount = Callable[[int], None]
"""Called with a number of rows."""


def ignore_count(number: int) -> None:
    """Do nothing."""


class CompletingTask(Task):
    """A mixin of token tasks whose model completes the prompts of rows."""

    layout: BatchLayout

    @property
    def prompt_format(self) -> PromptFormat | None:
        """How the model reads prompts without media; None: as its tokenizer says."""
        return None

    def answers(
        self,
        model: Any,
        rows: Sequence[Any],
        *,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        on_answer: OnCount | None = None,
        on_fewer: OnCount | None = None,
    ) -> list[Sample]:
        """Return the greedy completion of each row's prompt; a row without targets is a prompt.

        Args:
            max_new_tokens: None: by the longest reference of the rows.
            batch_size: Most completions at a time; None: the engine's default.
            on_answer: Called with the number of completions so far.
            on_fewer: Called with the new batch size when memory ran out.

        Raises:
            RunError: A row does not fit into memory.
        """
        from peftkit.inference.generate import decoded, generate_ids

        self.layout.forget()
        tokenizer = self.tokenizer
        prompts = [
            last_answer(tokenizer, row)[0] if row.num_targets else list(row.input_ids)
            for row in rows
        ]
        completions = generate_ids(
            model,
            tokenizer,
            prompts,
            max_new_tokens=max_new_tokens or longest_answer(rows),
            batch_size=batch_size,
            stops=stop_ids(tokenizer, self.rows.prompt_style),
            on_answer=on_answer,
            on_fewer=on_fewer,
        )
        return [
            Sample(
                decoded(tokenizer, prompt).strip(),
                decoded(tokenizer, ids),
                self.reference_text(row),
                row.source,
            )
            for row, prompt, ids in zip(rows, prompts, completions, strict=True)
        ]

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


def longest_answer(rows: Sequence[Any]) -> int:
    """Return the maximum length of a completion in tokens, by the longest reference."""
    lengths = [stop - start for start, stop in map(last_answer_span, rows)]
    return math.ceil(MARGIN * max(lengths))
