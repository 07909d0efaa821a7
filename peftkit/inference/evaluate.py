"""Evaluation of a model's answers: to every row of a file, or to some rows while it trains.

Answers are greedy, so that steps can be compared and a run's random generators do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from peftkit.base.load import Base
from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.pack import IGNORE, Row
from peftkit.data.row_text import last_answer, last_answer_span
from peftkit.data.style import Style
from peftkit.errors import DataError, PeftkitError, RunError
from peftkit.events import Listener, Notice, Progress, Sample, Stage, ignore
from peftkit.formats.open_adapter import read_side_adapter
from peftkit.inference.engine import AnswerTooLarge, OnAnswer, OnFewer, room_left
from peftkit.inference.generate import decoded, generate_ids
from peftkit.inference.predict import MediaPrompt, complete
from peftkit.model.modes import evaluating
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.base import Reference, Task
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.documents import DocumentTask
from peftkit.tasks.media.media_text import MediaText
from peftkit.tasks.metrics import rouge_l
from peftkit.tasks.rewards.grpo import GRPO, GRPOConfig, Prompt
from peftkit.tasks.rewards.reward_functions import RewardTerm
from peftkit.tasks.text.seq2seq import EncoderDecoder
from peftkit.tasks.tokens import CausalLM, CausalLMConfig, TokenTask, share_equal

MARGIN = 1.25
"""Longest answer, relative to the longest reference."""
NUM_SAMPLES = 3
"""Eval rows to sample without train.sample_prompts."""
BATCH_SIZE = 16
Metric = Callable[[str, str], float]
"""Maps a completion and its reference to a figure."""


def evaluate(
    base: Base,
    data: str | Path,
    *,
    task: TaskConfig | None = None,
    style: Style | None = None,
    before: Callable[[], AbstractContextManager[None]] | None = None,
    run_code: bool = False,
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
        run_code: Whether reward functions, which are Python files that the task names, are called.

    Returns:
        loss (mean over the targets), the task's metrics, and num_rows. For causal_lm, image_text
        and audio_text also perplexity, num_tokens and exact_match: the share of rows whose last
        answer, decoded greedily, equals the file's. For grpo the mean rewards of greedy answers, no
        loss, and exact_match over the rows that have an answer.

    Raises:
        DataError: The file has no usable rows.
        RunError: A reward function failed.
    """
    if isinstance(task, GRPOConfig) and task.has_tools and not run_code:
        text = "Tools are run only if asked (--run-rewards): answers are made without them."
        on_event(Notice(text))
        task = task.model_copy(update={"tools": (), "environment": None})
    built, rows = _rows(base, data, task or CausalLMConfig(), style, on_event)
    if before is not None and isinstance(built, DocumentTask):
        built.reference = Reference(before)
    metrics = built.metrics(base.model, rows, on_event=on_event)
    if isinstance(built, CausalLM | MediaText):
        answers = _answers(base, built, rows, on_event)
        metrics["exact_match"] = sum(answer.is_exact for answer in answers) / len(answers)
    if isinstance(built, GRPO):
        metrics |= _rewarded(base, built, [*rows], run_code, on_event)
    metrics["num_rows"] = len(rows)
    return dict(sorted(metrics.items(), key=lambda item: item[0].startswith("num_")))


def _rewarded(
    base: Base, task: GRPO, rows: Sequence[Prompt], run_code: bool, on_event: Listener
) -> dict[str, float]:
    """Return the mean rewards of greedy answers to prompts, and how often they are the rows' own.

    The weighted sum is left out where one of the rewards cannot be given here.
    """
    terms = [term for term in task.terms if _is_usable(base, task, term, on_event)]
    if functions := [term.use for term in terms if term.is_function and not run_code]:
        text = "Functions are called only if asked (--run-rewards): no reward by"
        on_event(Notice(f"{text} {', '.join(functions)}."))
        terms = [term for term in terms if not term.is_function]
    task.use_rewards(base.model, terms)
    on_event(Stage(f"Answering {len(rows)} prompts"))
    with evaluating(base.model):
        rollout = task.roll_out(rows, None, task.sampler(base.model))
    left_out = {"taught", "reward_std"}  # of groups of answers
    if not terms or len(terms) < len(task.terms):
        left_out.add("reward")
    figures = {name: value for name, value in rollout.metrics.items() if name not in left_out}
    pairs = [
        (one.completion, row.reference)
        for one, row in zip(rollout.answers, rows, strict=True)
        if row.reference is not None
    ]
    return figures | ({"exact_match": share_equal(pairs)} if pairs else {})


def _is_usable(base: Base, task: GRPO, term: RewardTerm, on_event: Listener) -> bool:
    """Load what a built-in reward reads; say so where it is not there."""
    try:
        if term.adapter is not None:
            task.add_adapter(term.adapter, read_side_adapter(term.adapter, base))
        elif not term.is_function:
            task.use_rewards(base.model, [term])
    except PeftkitError as error:
        on_event(Notice(f"The reward {term.use} is left out: {error}"))
        return False
    return True


def answer(
    base: Base, data: str | Path, *, style: Style | None = None, on_event: Listener = ignore
) -> list[Sample]:
    """Return the greedy completion of every row's last answer, with the reference."""
    task, rows = _rows(base, data, CausalLMConfig(), style, on_event)
    assert isinstance(task, CausalLM)
    return _answers(base, task, rows, on_event)


def _rows(
    base: Base, data: str | Path, task: TaskConfig, style: Style | None, on_event: Listener
) -> tuple[Task, Sequence[Any]]:
    config = DataConfig(train=str(data), max_length=None, packing=False)
    built = task.on(base.model, base.processor, config, style=style, on_event=on_event)
    return built, built.load(str(data))


def _answers(base: Base, task: Task, rows: Sequence[Any], on_event: Listener) -> list[Sample]:
    on_event(Stage(f"Completing {len(rows)} rows"))
    most = longest_answer(rows)
    return completions(
        base,
        task,
        rows,
        most,
        on_answer=lambda number: on_event(Progress("Completing", number, len(rows))),
    )


def longest_answer(rows: Sequence[Row]) -> int:
    """Return the maximum length of an answer in tokens, by the longest reference."""
    lengths = [stop - start for start, stop in map(last_answer_span, rows)]
    return math.ceil(MARGIN * max(lengths))


def completions(
    base: Base,
    task: Any,
    rows: Sequence[Any],
    max_new_tokens: int,
    *,
    batch_size: int | None = None,
    on_answer: OnAnswer | None = None,
    on_fewer: OnFewer | None = None,
) -> list[Sample]:
    """Return the greedy completion of each row's prompt; a row without targets is a prompt."""
    tokenizer = base.tokenizer
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "on_answer": on_answer,
        "on_fewer": on_fewer,
    }
    pairs: list[tuple[list[int], str | None]] = [
        last_answer(tokenizer, row) if row.num_targets else (list(row.input_ids), None)
        for row in rows
    ]
    if isinstance(task, MediaText):
        prompts = [row.prompt.strip() for row in rows]
        with_media = [MediaPrompt(row.prompt, row.media) for row in rows]
        answers = complete(base.model, task, with_media, **settings)
    else:
        prompts = [decoded(tokenizer, ids).strip() for ids, _ in pairs]
        settings |= {"stops": stop_ids(tokenizer, task.prompt_style), "batch_size": batch_size}
        answers = generate_ids(base.model, tokenizer, [ids for ids, _ in pairs], **settings)
    return [
        Sample(prompt, decoded(tokenizer, ids), reference, row.source)
        for row, prompt, (_, reference), ids in zip(rows, prompts, pairs, answers, strict=True)
    ]


class TextWatch:
    """Samples and metrics of generated answers while a model trains.

    Args:
        rows: The eval rows, packed or not.
        metrics: More metrics by name, besides exact_match and rouge_l; reported as means over rows.

    Raises:
        DataError: A prompt is empty, or longer than the model reads.
    """

    def __init__(
        self,
        base: Base,
        task: TokenTask,
        rows: Sequence[Any],
        config: TrainConfig,
        metrics: Mapping[str, Metric] | None = None,
        on_event: Listener = ignore,
    ) -> None:
        self._base, self._task, self._config, self._on_event = base, task, config, on_event
        self._metrics: dict[str, Metric] = {"rouge_l": rouge_l, **(metrics or {})}
        self._rows = rows
        self._prompts = [
            self._prompt(text, f"train.sample_prompts[{n}]")
            for n, text in enumerate(config.sample_prompts or ())
        ]

    def samples(self) -> tuple[Sample, ...]:
        """Return answers to train.sample_prompts, or to the first eval rows."""
        prompts = self._prompts or [document for _, document in self._documents(NUM_SAMPLES)]
        return tuple(self._answers(prompts, self._config.sample_tokens))

    def metrics(self) -> dict[str, float]:
        """Return exact_match, rouge_l and the metrics of the user over train.eval_generate rows."""
        if not (pairs := self._documents(self._config.eval_generate or 0)):
            return {}
        task, rows = self._task, [document for _, document in pairs]
        most = task.max_target if isinstance(task, EncoderDecoder) else longest_answer(rows)
        answers = self._answers(rows, most)
        texts = [(answer.completion, answer.reference or "") for answer in answers]
        means = task.answer_metrics(texts, [row for row, _ in pairs])
        for name, metric in list(self._metrics.items()):
            try:
                values = [float(metric(*pair)) for pair in texts]
                means[name] = sum(values) / len(values)
            except Exception as error:  # a user's metric must not end the run
                del self._metrics[name]
                text = f"The metric {name} failed and is left out from here on: {error!r}"
                self._on_event(Notice(text))
        return means

    def _documents(self, number: int) -> list[tuple[Any, Any]]:
        """Return the first documents of the eval rows with an answer, each with its row."""
        task, pairs = self._task, list[tuple[Any, Any]]()
        for row in self._rows:
            if len(pairs) >= number:
                break
            documents = [row] if isinstance(task, EncoderDecoder) else task.prompted(row)
            pairs += [(row, document) for document in documents]
        return pairs[:number]

    def _prompt(self, text: str, where: str) -> Any:
        """Return a prompt of the recipe as a row without an answer."""
        task = self._task
        try:
            if isinstance(task, EncoderDecoder | MediaText):
                return task.prompt_row(text, where)
            ids = prompt_ids(task.tokenizer, text, task.prompt_style)
            room_left(self._base.model, [ids], 1)
        except DataError as error:
            raise DataError(
                f"Cannot use {where}: {error.problem}", found=error.found, fix=error.fix
            ) from None
        return Row(tuple(ids), (IGNORE,) * len(ids), (len(ids),), where)

    def _answers(self, rows: Sequence[Any], max_new_tokens: int) -> list[Sample]:
        """Return the answers to rows.

        Raises:
            RunError: Memory ran out for one of them by itself.
        """
        self._task.forget_layout()  # of the last training step
        try:
            return self._generated(rows, max_new_tokens)
        except AnswerTooLarge as error:
            raise RunError(
                error.problem,
                found=error.found,
                fix="Leave out train.sample_every and train.eval_generate; peftkit generate and "
                "eval answer afterwards.",
            ) from None

    def _generated(self, rows: Sequence[Any], max_new_tokens: int) -> list[Sample]:
        task, model = self._task, self._base.model
        if not isinstance(task, EncoderDecoder):
            return completions(
                self._base,
                task,
                rows,
                max_new_tokens,
                batch_size=BATCH_SIZE,
                on_fewer=self._tell_fewer,
            )
        with evaluating(model):
            answers = task.answers(
                model, rows, max_new_tokens=max_new_tokens, on_fewer=self._tell_fewer
            )
        return [
            Sample(task.shown(row), answer, task.reference(row) or None, row.source)
            for row, answer in zip(rows, answers, strict=True)
        ]

    def _tell_fewer(self, number: int) -> None:
        text = f"Memory ran out while text was generated: {number} prompts at a time."
        self._on_event(Notice(f"{text} Training is not affected."))
