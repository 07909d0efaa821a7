"""Demonstrations of other rows in the teacher's prompt (OP2SD, arXiv:2608.09228).

The encoder stores the messages of each row. After the eval rows are split off, each row gets one of
the training rows, drawn by seed, as an example conversation before its own in the teacher's prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from peftkit.data.generation import prompt_ids
from peftkit.data.prompts import PromptExample
from peftkit.data.records import Dropped
from peftkit.data.rows.lazy import LazyRows, num_tokens
from peftkit.errors import DataError
from peftkit.events import Listener, Notice, Progress
from peftkit.execution import rng
from peftkit.settings import DataConfig
from peftkit.tasks.distill.rows import Distilled, DistillEncoder, distilled
from peftkit.tasks.row_loader import RowLoader

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

    def _row(self, example: PromptExample, counts: Counter[str]) -> Distilled | Dropped:
        row = super()._row(example, counts)
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
        teacher = prompt_ids(self._tokenizer, prompt.before(messages), self.style, tools)
        student, answer = row.student_prompt, row.answer
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
        rows: Sequence[Any],
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
