"""What a model says while it trains: samples of its answers, and how good they are.

Answers are greedy, so that the same prompts may be compared over steps, and the generators of the
run stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peftkit.base.load import Base
from peftkit.data.encode import prompt_ids
from peftkit.data.pack import IGNORE, Row
from peftkit.errors import DataError, RunError
from peftkit.events import Listener, Notice, Sample, ignore
from peftkit.inference.engine import room_left
from peftkit.inference.evaluate import completions, longest_answer
from peftkit.model.modes import evaluating
from peftkit.tasks.metrics import rouge_l
from peftkit.tasks.seq2seq import EncoderDecoder
from peftkit.tasks.token_task import AnswerTask
from peftkit.train.config import TrainConfig
from peftkit.train.memory.out_of_memory import is_out_of_memory, release_memory
from peftkit.train.sharding import is_sharded

NUM_SAMPLES = 3
"""Eval rows that are sampled where the recipe names no prompts."""
BATCH_SIZE = 16
Metric = Callable[[str, str], float]
"""How good a completion is, given the reference."""


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
            if isinstance(task, EncoderDecoder):
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
        self._task.forget_layout()  # what the last training step set is not of these rows
        if isinstance(self._task, EncoderDecoder):
            return self._translated(self._task, rows, max_new_tokens)
        size = self._batch_size
        return completions(self._base, self._task, rows, max_new_tokens, batch_size=size)

    def _translated(
        self, task: EncoderDecoder, rows: Sequence[Any], max_new_tokens: int
    ) -> list[Sample]:
        with evaluating(self._base.model):
            answers = task.answers(self._base.model, rows, max_new_tokens=max_new_tokens)
        return [
            Sample(
                prompt=task.shown(row),
                completion=answer,
                reference=task.reference(row) or None,
                source=row.source,
            )
            for row, answer in zip(rows, answers, strict=True)
        ]


def _share_equal(pairs: Sequence[tuple[str, str]]) -> float:
    return sum(a.strip() == b.strip() for a, b in pairs) / len(pairs)
