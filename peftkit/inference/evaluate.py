"""Evaluates an adapter on a file with its task's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peftkit.base.load import Base
from peftkit.data.encode import Style, stop_ids
from peftkit.data.image_row import ImageRow
from peftkit.data.load import DataConfig
from peftkit.data.pack import Row
from peftkit.events import Listener, Progress, Stage, ignore
from peftkit.inference.generate import generate_ids
from peftkit.inference.generate_images import ImagePrompt
from peftkit.inference.generate_images import complete as complete_images
from peftkit.inference.text import decoded
from peftkit.tasks.causal_lm import CausalLM, CausalLMConfig
from peftkit.tasks.image_text import ImageText
from peftkit.tasks.measure import BATCH_SIZE
from peftkit.tasks.protocol import Task, TaskConfig

MARGIN = 1.25
"""Tokens that a completion may have beyond the longest reference."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One row's prompt, the reference answer, and the completion."""

    source: str
    prompt: str
    reference: str
    completion: str

    @property
    def is_exact(self) -> bool:
        """Whether the completion equals the reference, apart from surrounding white space."""
        return self.completion.strip() == self.reference.strip()


def evaluate(
    base: Base,
    data: str | Path,
    *,
    task: TaskConfig | None = None,
    style: Style | None = None,
    before: Callable[[], AbstractContextManager[None]] | None = None,
    on_event: Listener = ignore,
) -> dict[str, float]:
    """Evaluate a base, with the adapter that is attached to it, on every row of a file.

    Args:
        base: The model with its tokenizer; left unchanged.
        data: Rows in any format that training takes.
        task: The adapter's task, as in `Opened`; causal_lm by default.
        style: The adapter's prompt format; None: as the rows' format suggests.
        before: Makes the model what it was before training, for tasks that compare it with that
            (`peftkit.formats.continued.before_training`); None: the base without an adapter.

    Returns:
        loss (mean over the targets), the task's metrics, and num_rows. For causal_lm and
        image_text: perplexity,
        exact_match (share of rows whose last answer, decoded greedily, equals the file's), and
        num_tokens.

    Raises:
        DataError: The file has no usable rows.
    """
    measured, rows = _rows(base, data, task or CausalLMConfig(), style, on_event)
    if before is not None:
        measured.set_reference(before, "")
    metrics = measured.metrics(base.model, rows, on_event=on_event)
    if isinstance(measured, CausalLM | ImageText):
        seen = isinstance(measured, ImageText)
        found = _answers_to_images if seen else _answers
        answers = found(base, measured, rows, on_event)
        metrics["exact_match"] = sum(answer.is_exact for answer in answers) / len(answers)
    metrics["num_rows"] = len(rows)
    return dict(sorted(metrics.items(), key=lambda item: item[0].startswith("num_")))


def answer(
    base: Base, data: str | Path, *, style: Style | None = None, on_event: Listener = ignore
) -> list[Answer]:
    """Return the greedy completion of every row's last answer, with the reference."""
    task, rows = _rows(base, data, CausalLMConfig(), style, on_event)
    assert isinstance(task, CausalLM)
    return _answers(base, task, rows, on_event)


def _rows(
    base: Base, data: str | Path, task: TaskConfig, style: Style | None, on_event: Listener
) -> tuple[Task, Sequence[Any]]:
    config = DataConfig(train=str(data), max_length=None, packing=False)
    measured = task.on(base.model, base.processor, config, style=style, on_event=on_event)
    return measured, measured.load(str(data))


def _answers(base: Base, task: Any, rows: Sequence[Row], on_event: Listener) -> list[Answer]:
    on_event(Stage(f"Completing {len(rows)} rows"))
    tokenizer = base.tokenizer
    asked = [task.last_answer(row) for row in rows]
    longest = max(len(row.input_ids) - len(ids) for row, (ids, _) in zip(rows, asked, strict=True))
    completions = generate_ids(
        base.model,
        tokenizer,
        [ids for ids, _ in asked],
        max_new_tokens=math.ceil(MARGIN * longest),
        stops=stop_ids(tokenizer, task.style),
        on_answer=lambda number: on_event(Progress("Completing", number, len(rows))),
    )
    return [
        Answer(
            row.source,
            tokenizer.decode(ids, skip_special_tokens=True),
            reference,
            tokenizer.decode(completion, skip_special_tokens=True),
        )
        for row, (ids, reference), completion in zip(rows, asked, completions, strict=True)
    ]


def _answers_to_images(
    base: Base, task: Any, rows: Sequence[ImageRow], on_event: Listener
) -> list[Answer]:
    on_event(Stage(f"Completing {len(rows)} rows"))
    wanted = [task.last_answer(row) for row in rows]
    longest = max(task.answer_length(row) for row in rows)
    answers = []
    for start in range(0, len(rows), BATCH_SIZE):
        on_event(Progress("Completing", start, len(rows)))
        part = rows[start : start + BATCH_SIZE]
        completions = complete_images(
            base.model,
            task,
            [ImagePrompt(row.prompt, row.images) for row in part],
            max_new_tokens=math.ceil(MARGIN * longest),
        )
        answers += [
            Answer(row.source, row.prompt, reference, decoded(task.tokenizer, ids))
            for row, (_, reference), ids in zip(
                part, wanted[start : start + len(part)], completions, strict=True
            )
        ]
    return answers
