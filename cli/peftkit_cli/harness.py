"""Tasks of lm-evaluation-harness, for the base and for the adapter.

The harness (the extra `lm-eval`) builds the prompts and computes the scores. It receives the model
object: the scores equal a run of the harness with PEFT and the same adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peftkit.data.generation import template_of
from peftkit.errors import ConfigError, did_you_mean, install_extra
from peftkit.events import Listener, Notice, Stage, Table, ignore
from peftkit.files.strict_json import JsonMap
from peftkit.formats.open_adapter import Opened, require_causal


@dataclass(frozen=True, slots=True)
class Score:
    """A figure of a task.

    Attributes:
        metric: The harness's name, with its filter if that is not "none".
        base, adapter: The figure without and with the adapter.
        stderr: Standard error of the adapter's figure; None: the harness has none.
        num_rows: Number of evaluated rows.
    """

    task: str
    metric: str
    base: float
    adapter: float
    stderr: float | None
    num_rows: int


def run_tasks(
    opened: Opened,
    tasks: Sequence[str],
    *,
    include: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
    batch_size: int = 8,
    on_event: Listener = ignore,
) -> list[Score]:
    """Evaluate tasks of lm-evaluation-harness, with the adapter and without it.

    `peftkit eval --help` describes the options; None: all rows, each task's default examples.

    Raises:
        ConfigError: The harness is not installed, or has no such task; or there is no template.
        AdapterError: The adapter does not complete prompts.
    """
    require_causal(opened.task, opened.file.folder, media=False)
    tokenizer = opened.base.tokenizer
    if chat_template:
        tokenizer = with_template(opened, on_event)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            "--tasks needs lm-evaluation-harness.",
            found=str(error),
            fix=install_extra("lm-eval"),
        ) from None
    manager = TaskManager(include_path=None if include is None else str(include))
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise ConfigError(
            f"lm-evaluation-harness has no task '{unknown[0]}'.",
            found=did_you_mean(unknown[0], manager.all_tasks),
            fix="List the names with lm-eval ls tasks; add task files with --include FOLDER.",
        )
    model = HFLM(opened.base.model, tokenizer=tokenizer, batch_size=batch_size)
    results = {}
    for name, context in (("base", opened.adapter.disabled()), ("adapter", nullcontext())):
        on_event(Stage(f"Tasks of the {name}: {', '.join(tasks)}"))
        with context:
            results[name] = simple_evaluate(
                model,
                tasks=list(tasks),
                task_manager=manager,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=chat_template,
                log_samples=False,
            )
    scores = scores_of(results["base"], results["adapter"])
    rows = tuple(
        (s.task, s.metric, f"{s.base:.4g}", f"{s.adapter:.4g}", f"{s.adapter - s.base:+.4g}")
        for s in scores
    )
    on_event(Table("Tasks", ("task", "metric", "base", "adapter", "change"), rows))
    return scores


def with_template(opened: Opened, on_event: Listener = ignore) -> Any:
    """Return a tokenizer with the chat template of an adapter's training.

    If the adapter was trained without a template, use the tokenizer's, with a notice.

    Raises:
        ConfigError: There is no template.
    """
    style, folder = opened.style, opened.file.folder
    tokenizer = copy.copy(opened.base.tokenizer)
    if (template := template_of(tokenizer, style)) is not None:
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        raise ConfigError(
            "--chat-template needs a chat template.",
            found=f"{folder} was trained on prompts of the style {style.kind}, and the tokenizer "
            "has no template.",
            fix="Leave --chat-template out.",
        )
    if style.kind != "chat":
        text = f"{folder} was trained on prompts of the style {style.kind}, without a chat template"
        on_event(Notice(f"{text}: --chat-template renders other prompts than in training."))
    return tokenizer


def scores_of(base: JsonMap, adapter: JsonMap) -> list[Score]:
    """Return the scores of two results of the harness, in its order."""
    scores = []
    for task, figures in adapter["results"].items():
        for name, value in figures.items():
            metric, comma, kind = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = figures.get(f"{metric}_stderr,{kind}")
            scores.append(
                Score(
                    task=task,
                    metric=metric if kind == "none" else f"{metric} ({kind})",
                    base=float(base["results"][task][name]),
                    adapter=float(value),
                    stderr=stderr if isinstance(stderr, float) else None,
                    num_rows=adapter["n-samples"].get(task, {}).get("effective", 0),
                )
            )
    return scores
