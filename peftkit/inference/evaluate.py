"""Evaluates an adapter on a file with its task's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from peftkit.base.load import Base
from peftkit.data.encode import Style, stop_ids
from peftkit.data.load import DataConfig
from peftkit.data.pack import last_answer
from peftkit.events import Listener, Progress, Sample, Stage, ignore
from peftkit.inference.engine import OnAnswer
from peftkit.inference.generate import generate_ids
from peftkit.inference.generate_images import ImagePrompt, complete
from peftkit.inference.text import decoded
from peftkit.tasks.causal_lm import CausalLM, CausalLMConfig
from peftkit.tasks.image_text import ImageText
from peftkit.tasks.protocol import Task, TaskConfig

Answer = Sample
MARGIN = 1.25
"""Answers may be this much longer than the longest reference before they are cut."""


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
        answers = _answers(base, measured, rows, on_event)
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


def _answers(base: Base, task: Task, rows: Sequence[Any], on_event: Listener) -> list[Answer]:
    on_event(Stage(f"Completing {len(rows)} rows"))
    most = longest_answer(task, rows)
    return completions(
        base,
        task,
        rows,
        most,
        on_answer=lambda number: on_event(Progress("Completing", number, len(rows))),
    )


def longest_answer(task: Any, rows: Sequence[Any]) -> int:
    """Return how many tokens an answer may have, by the longest reference."""
    if isinstance(task, ImageText):
        lengths = [task.answer_length(row) for row in rows]
    else:
        lengths = [len(row.input_ids) - len(last_answer(task.tokenizer, row)[0]) for row in rows]
    return math.ceil(MARGIN * max(lengths))


def completions(
    base: Base,
    task: Any,
    rows: Sequence[Any],
    max_new_tokens: int,
    *,
    batch_size: int | None = None,
    on_answer: OnAnswer | None = None,
) -> list[Answer]:
    """Return what a model says greedily to each row's prompt; a row without targets is a prompt."""
    tokenizer = base.tokenizer
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "on_answer": on_answer}
    asked: list[tuple[list[int], str | None]] = [
        last_answer(tokenizer, row) if row.num_targets else (list(row.input_ids), None)
        for row in rows
    ]
    if isinstance(task, ImageText):
        prompts = [row.prompt.strip() for row in rows]
        shown = [ImagePrompt(row.prompt, row.images) for row in rows]
        answers = complete(base.model, task, shown, **how)
    else:
        prompts = [decoded(tokenizer, ids).strip() for ids, _ in asked]
        stops = stop_ids(tokenizer, task.style)
        how |= {"stops": stops, "batch_size": batch_size}
        answers = generate_ids(base.model, tokenizer, [ids for ids, _ in asked], **how)
    return [
        Answer(prompt, decoded(tokenizer, ids), reference, row.source)
        for row, prompt, (_, reference), ids in zip(rows, prompts, asked, answers, strict=True)
    ]
