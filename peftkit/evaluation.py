"""How good an adapter is on a file of rows: loss, perplexity, exact match of completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peftkit.base import Base
from peftkit.data.encode import Style, stop_ids
from peftkit.data.load import DataConfig
from peftkit.data.pack import Row
from peftkit.events import Listener, Progress, Stage, ignore
from peftkit.generation import complete
from peftkit.tasks.causal_lm import CausalLM
from peftkit.train.metrics import perplexity

BATCH_SIZE = 8
MARGIN = 1.25
"""Completions may be this much longer than the longest reference before they are cut."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One row's prompt, what it should be answered with, and what it was."""

    source: str
    prompt: str
    reference: str
    completion: str

    @property
    def is_exact(self) -> bool:
        """Whether the completion is the reference, but for white space around it."""
        return self.completion.strip() == self.reference.strip()


def evaluate(
    base: Base, data: str | Path, *, style: Style | None = None, on_event: Listener = ignore
) -> dict[str, float]:
    """Measure a base, with the adapter that is on it, on every row of a file.

    Args:
        base: The model, and its tokenizer; it is left as it was.
        data: Rows in any format that training takes.
        style: How the adapter was trained to be prompted; None: as the rows' format suggests.

    Returns:
        loss (nats per target token), perplexity, exact_match (share of rows whose last answer,
        decoded greedily, equals the file's), num_rows, num_tokens.

    Raises:
        DataError: The file has no usable rows.
    """
    task, rows = _rows(base, data, style, on_event)
    loss, num_tokens = _loss(base, task, rows, on_event)
    answers = _answers(base, task, rows, on_event)
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "exact_match": sum(answer.is_exact for answer in answers) / len(answers),
        "num_rows": len(rows),
        "num_tokens": num_tokens,
    }


def answer(
    base: Base, data: str | Path, *, style: Style | None = None, on_event: Listener = ignore
) -> list[Answer]:
    """Return the greedy completion of every row's last answer beside the file's own."""
    task, rows = _rows(base, data, style, on_event)
    return _answers(base, task, rows, on_event)


def _rows(
    base: Base, data: str | Path, style: Style | None, on_event: Listener
) -> tuple[CausalLM, list[Row]]:
    config = DataConfig(train=str(data), max_length=None, packing=False)
    task = CausalLM(base.model, base.tokenizer, config, style=style, on_event=on_event)
    return task, task.load(str(data))


@torch.no_grad()
def _loss(base: Base, task: CausalLM, rows: Sequence[Row], on_event: Listener) -> tuple[float, int]:
    total, num_tokens = 0.0, 0
    by_length = sorted(rows, key=lambda row: len(row.input_ids))  # little padding in a batch
    for start in range(0, len(by_length), BATCH_SIZE):
        on_event(Progress("Measuring the loss", start, len(rows)))
        batch = task.collate(by_length[start : start + BATCH_SIZE])
        batch = {name: tensor.to(base.device) for name, tensor in batch.items()}
        total += float(task.loss_sum(base.model, batch))
        num_tokens += task.num_targets(batch)
    return total / num_tokens, num_tokens


def _answers(base: Base, task: CausalLM, rows: Sequence[Row], on_event: Listener) -> list[Answer]:
    on_event(Stage(f"Completing {len(rows)} rows"))
    tokenizer = base.tokenizer
    asked = [task.last_answer(row) for row in rows]
    longest = max(len(row.input_ids) - len(ids) for row, (ids, _) in zip(rows, asked, strict=True))
    answers = []
    for start in range(0, len(rows), 4 * BATCH_SIZE):
        on_event(Progress("Completing", start, len(rows)))
        part = asked[start : start + 4 * BATCH_SIZE]
        completions = complete(
            base.model,
            tokenizer,
            [ids for ids, _ in part],
            max_new_tokens=math.ceil(MARGIN * longest),
            stops=stop_ids(tokenizer, task.style),
            batch_size=4 * BATCH_SIZE,
        )
        answers += [
            Answer(
                row.source,
                tokenizer.decode(ids, skip_special_tokens=True),
                reference,
                tokenizer.decode(completion, skip_special_tokens=True),
            )
            for row, (ids, reference), completion in zip(
                rows[start : start + len(part)], part, completions, strict=True
            )
        ]
    return answers
