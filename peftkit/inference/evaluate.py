"""How good a model's answers are: to every row of a file, or to some of them while it trains.

Answers are greedy, so that the same prompts may be compared over steps, and the generators of a run
stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from peftkit.base.load import Base
from peftkit.base.sharding import is_sharded
from peftkit.data.encode import Style, prompt_ids, stop_ids
from peftkit.data.load import DataConfig
from peftkit.data.pack import IGNORE, Row, last_answer
from peftkit.errors import DataError, RunError
from peftkit.events import Listener, Notice, Progress, Sample, Stage, ignore
from peftkit.execution.out_of_memory import is_out_of_memory, release_memory
from peftkit.inference.engine import OnAnswer, room_left
from peftkit.inference.generate import decoded, generate_ids
from peftkit.inference.generate_media import MediaPrompt, complete
from peftkit.model.modes import evaluating
from peftkit.settings import TrainConfig
from peftkit.tasks.causal_lm import CausalLM, CausalLMConfig
from peftkit.tasks.media_text import MediaText
from peftkit.tasks.metrics import rouge_l
from peftkit.tasks.protocol import Task, TaskConfig
from peftkit.tasks.seq2seq import EncoderDecoder
from peftkit.tasks.token_task import AnswerTask, DocumentTask, Reference

Answer = Sample
MARGIN = 1.25
"""Answers may be this much longer than the longest reference before they are cut."""
NUM_SAMPLES = 3
"""Eval rows that are sampled where the recipe names no prompts."""
BATCH_SIZE = 16
Metric = Callable[[str, str], float]
"""How good a completion is, given the reference."""


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
        loss (mean over the targets), the task's metrics, and num_rows. For causal_lm, image_text
        and audio_text: perplexity,
        exact_match (share of rows whose last answer, decoded greedily, equals the file's), and
        num_tokens.

    Raises:
        DataError: The file has no usable rows.
    """
    measured, rows = _rows(base, data, task or CausalLMConfig(), style, on_event)
    if before is not None and isinstance(measured, DocumentTask):
        measured.reference = Reference(before)
    metrics = measured.metrics(base.model, rows, on_event=on_event)
    if isinstance(measured, CausalLM | MediaText):
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
    if isinstance(task, MediaText):
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
    if isinstance(task, MediaText):
        prompts = [row.prompt.strip() for row in rows]
        shown = [MediaPrompt(row.prompt, row.media) for row in rows]
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


class TextWatch:
    """Samples and metrics of what a model with an adapter on it generates (`train.task.Watch`).

    Args:
        rows: The eval rows, packed or not.
        metrics: More metrics by name, beside exact_match and rouge_l; the mean over rows counts.

    Raises:
        DataError: A prompt is empty, or longer than the model reads.
    """

    def __init__(
        self,
        base: Base,
        task: AnswerTask | EncoderDecoder,
        rows: Sequence[Any],
        config: TrainConfig,
        metrics: Mapping[str, Metric] | None = None,
        on_event: Listener = ignore,
    ) -> None:
        self._base, self._task, self._config, self._on_event = base, task, config, on_event
        self._batch_size = BATCH_SIZE
        self._metrics: dict[str, Metric] = {"rouge_l": rouge_l, **(metrics or {})}
        self._rows = rows
        self._prompts = [
            self._prompt(text, f"train.sample_prompts[{n}]")
            for n, text in enumerate(config.sample_prompts or ())
        ]

    def samples(self) -> tuple[Sample, ...]:
        """Return what the model says to the prompts; those of the eval rows have a reference."""
        asked = self._prompts or [each for _, each in self._watched(NUM_SAMPLES)]
        return tuple(self._answers(asked, self._config.sample_tokens))

    def metrics(self) -> dict[str, float]:
        """Return the share of answers that are exact, rouge_l and the metrics asked for: means over
        train.eval_generate."""
        if not (watched := self._watched(self._config.eval_generate or 0)):
            return {}
        task, asked = self._task, [each for _, each in watched]
        most = task.max_target if isinstance(task, EncoderDecoder) else longest_answer(task, asked)
        said = self._answers(asked, most)
        pairs = [(one.completion, one.reference or "") for one in said]
        if isinstance(task, EncoderDecoder):
            found = {"exact_match": _share_equal(pairs), **task.answer_metrics(pairs)}
        else:
            found = self._to_others(task, watched, said)
            found[task.exact_name] = _share_equal(pairs)
        for name, metric in list(self._metrics.items()):
            try:
                values = [float(metric(*pair)) for pair in pairs]
                found[name] = sum(values) / len(values)
            except Exception as error:  # a metric of one's own costs itself, not the run
                del self._metrics[name]
                text = f"The metric {name} failed and is left out from here on: {error!r}"
                self._on_event(Notice(text))
        return found

    def _to_others(
        self, task: AnswerTask, watched: Sequence[tuple[Any, Any]], said: Sequence[Sample]
    ) -> dict[str, float]:
        """Return how often answers equal what their rows compare them with beside the learnt."""
        others = [task.other_reference(row) for row, _ in watched]
        pairs = [(one.completion, o) for one, o in zip(said, others, strict=True) if o is not None]
        return {"exact_match": _share_equal(pairs)} if pairs else {}

    def _watched(self, number: int) -> list[tuple[Any, Any]]:
        """Return the first documents of the eval rows that ask for an answer, each with its row."""
        found: list[tuple[Any, Any]] = []
        for row in self._rows:
            if len(found) >= number:
                break
            task = self._task
            each = [row] if isinstance(task, EncoderDecoder) else task.watched(row)
            found += [(row, one) for one in each]
        return found[:number]

    def _prompt(self, text: str, where: str) -> Any:
        """Return a prompt of the recipe as a row; its answer is not known."""
        task = self._task
        try:
            if isinstance(task, EncoderDecoder | MediaText):
                return task.prompt_row(text, where)
            ids = prompt_ids(task.tokenizer, text, task.style)
            room_left(self._base.model, [ids], 1)
        except DataError as error:
            raise DataError(
                f"Cannot use {where}: {error.asked}", found=error.found, fix=error.fix
            ) from None
        return Row(tuple(ids), (IGNORE,) * len(ids), (len(ids),), where)

    def _answers(self, rows: Sequence[Any], max_new_tokens: int) -> list[Sample]:
        """Return the answers to rows; with fewer at a time once memory has run out.

        Several processes that share a base have to generate alike, and cannot.
        """
        while True:
            try:
                return self._generated(rows, max_new_tokens)
            except Exception as error:
                if not is_out_of_memory(error) or is_sharded(self._base.model):
                    raise
                if self._batch_size == 1:
                    raise RunError(
                        "memory ran out while one prompt was answered",
                        found=f"Up to {max_new_tokens:,} tokens are generated.",
                        fix="Leave out train.sample_every and train.eval_generate; peftkit "
                        "generate and eval answer afterwards.",
                    ) from None
            release_memory()
            self._batch_size //= 2
            text = f"Memory ran out while text was generated: {self._batch_size} prompts at a time."
            self._on_event(Notice(f"{text} Training is not affected."))

    def _generated(self, rows: Sequence[Any], max_new_tokens: int) -> list[Sample]:
        task, model = self._task, self._base.model
        task.forget_layout()  # what the last training step set is not of these rows
        if not isinstance(task, EncoderDecoder):
            size = self._batch_size
            return completions(self._base, task, rows, max_new_tokens, batch_size=size)
        with evaluating(model):
            answers = task.answers(model, rows, max_new_tokens=max_new_tokens)
        return [
            Sample(task.shown(row), answer, task.reference(row) or None, row.source)
            for row, answer in zip(rows, answers, strict=True)
        ]


def _share_equal(pairs: Sequence[tuple[str, str]]) -> float:
    return sum(a.strip() == b.strip() for a, b in pairs) / len(pairs)
