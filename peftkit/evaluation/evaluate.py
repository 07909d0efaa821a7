"""Evaluation of a base and its adapter on every row of a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from peftkit.base.load import Base
from peftkit.config.strict_yaml import SourceLocation, parse
from peftkit.data.style import Style
from peftkit.errors import PeftkitError
from peftkit.events import Listener, Notice, Progress, Sample, Stage, ignore
from peftkit.execution.world import Rows
from peftkit.formats.folders import RECIPE
from peftkit.formats.open_adapter import read_side_adapter
from peftkit.settings import DataConfig
from peftkit.tasks.base import Task
from peftkit.tasks.completions import CompletingTask
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.run_hooks import Reference, hooks_of
from peftkit.tasks.tokens import CausalLMConfig


def evaluate(
    base: Base,
    data: str | Path,
    *,
    task: TaskConfig | None = None,
    style: Style | None = None,
    before: Callable[[], AbstractContextManager[None]] | None = None,
    run_code: bool = False,
    max_length: int | None = None,
    on_event: Listener = ignore,
) -> dict[str, float]:
    """Evaluate a base, with the adapter attached to it, on every row of a file.

    Args:
        base: The model with its tokenizer; left unchanged.
        data: Rows in any format that training takes.
        task: The adapter's task, as in `Opened`; causal_lm by default.
        style: The adapter's prompt format; None: as the rows' format suggests.
        before: A context with the model as before training, for tasks with a reference model
            (`peftkit.formats.open_adapter.before_training`); None: the base without an adapter.
        run_code: Whether Python functions that the task names, such as rewards, are called.
        max_length: Longest row in tokens, as in training (`trained_length`); None: the model's.

    Returns:
        loss (mean over the targets), the task's metrics, and num_rows. For causal_lm, image_text
        and audio_text also perplexity, num_targets and exact_match: the share of rows whose last
        answer, decoded greedily, equals the file's. For grpo the mean rewards of greedy
        completions, no loss, and exact_match over the rows that have an answer.

    Raises:
        DataError: The file has no usable rows.
        RunError: A reward function failed.
    """
    config = task or CausalLMConfig()
    if not run_code and (without := config.without_tools()) is not config:
        text = "Tools run only with --run-rewards: completions are generated without them."
        on_event(Notice(text))
        config = without
    built, rows = _rows(base, data, config, style, on_event, max_length)
    hooks = hooks_of(built)
    if before is not None:
        hooks.set_reference(Reference(before))
    for folder in hooks.other_adapters:
        try:
            hooks.add_adapter(folder, read_side_adapter(folder, base))
        except PeftkitError as error:
            on_event(Notice(f"The adapter {folder} is left out: {error}"))
    metrics = built.metrics(base.model, rows, on_event=on_event)
    if config.evaluates_answers:
        answers = _answers(base, built, rows, on_event)
        pairs = [(answer.completion, answer.reference or "") for answer in answers]
        assert isinstance(built, CompletingTask)
        metrics |= built.answer_metrics(pairs, rows)
    metrics |= hooks.completion_metrics(base.model, rows, run_code=run_code, on_event=on_event)
    metrics["num_rows"] = len(rows)
    return dict(sorted(metrics.items(), key=lambda item: item[0].startswith("num_")))


def trained_length(folder: Path) -> int | None:
    """Return data.max_length of the run that an adapter or a checkpoint is from; None if unknown.

    The run's recipe names it: next to the adapter, or above the checkpoints.
    """
    for file in (folder / RECIPE, folder.parent.parent / RECIPE):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        recipe = parse(text, lambda line: SourceLocation(str(file), line)).data  # noqa: B023
        data = recipe.get("data") if isinstance(recipe, dict) else None
        length = data.get("max_length") if isinstance(data, dict) else None
        return length if isinstance(length, int) and length > 0 else None
    return None


def answer(
    base: Base, data: str | Path, *, style: Style | None = None, on_event: Listener = ignore
) -> list[Sample]:
    """Return the greedy completion of every row's last answer, with the reference."""
    task, rows = _rows(base, data, CausalLMConfig(), style, on_event)
    return _answers(base, task, rows, on_event)


def _rows(
    base: Base,
    data: str | Path,
    task: TaskConfig,
    style: Style | None,
    on_event: Listener,
    max_length: int | None = None,
) -> tuple[Task, Rows]:
    config = DataConfig(train=str(data), max_length=max_length, packing=False)
    built = task.on(base.model, base.processor, config, style=style, on_event=on_event)
    return built, built.load(str(data))


def _answers(base: Base, task: Task, rows: Rows, on_event: Listener) -> list[Sample]:
    assert isinstance(task, CompletingTask)
    on_event(Stage(f"Completing {len(rows)} rows"))
    return task.answers(
        base.model,
        rows,
        on_answer=lambda number: on_event(Progress("Completing", number, len(rows))),
    )
