"""What a model says while it trains: samples of its answers, and how good they are.

Answers are greedy, so that the same prompts may be compared over steps, and the generators of the
run stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peftkit.base.load import Base
from peftkit.data.encode import prompt_ids
from peftkit.data.format import Completion
from peftkit.data.pack import IGNORE, Row
from peftkit.errors import ConfigError, DataError, RunError
from peftkit.events import Listener, Notice, Sample, ignore
from peftkit.inference.engine import room_left
from peftkit.inference.evaluate import completions, longest_answer
from peftkit.model.modes import evaluating
from peftkit.tasks.causal_lm import CausalLM
from peftkit.tasks.distill.task import Distill
from peftkit.tasks.metrics import rouge_l
from peftkit.tasks.preference.rows import Compared
from peftkit.tasks.preference.task import Preference
from peftkit.tasks.protocol import Task
from peftkit.tasks.seq2seq import PairRow, Seq2Seq
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
        ConfigError: The task writes no text.
        DataError: A prompt is empty, or longer than the model reads.
    """

    def __init__(
        self,
        base: Base,
        task: Task,
        rows: Sequence[Any],
        config: TrainConfig,
        metrics: Mapping[str, Metric] | None = None,
        on_event: Listener = ignore,
    ) -> None:
        if not isinstance(task, CausalLM | Distill | Preference | Seq2Seq):
            raise ConfigError(
                f"{type(task).__name__} writes no text to look at.",
                found="train.sample_every or train.eval_generate is set.",
                fix="Leave it out, or train for a task whose models write text.",
            )
        self._base, self._task, self._config, self._on_event = base, task, config, on_event
        self._batch_size = BATCH_SIZE
        self._metrics: dict[str, Metric] = {"rouge_l": rouge_l, **(metrics or {})}
        number = config.eval_generate or 0
        self._measured = _documents(rows, number)
        if config.sample_prompts:
            self._sampled = [
                self._prompt(text, f"train.sample_prompts[{n}]")
                for n, text in enumerate(config.sample_prompts)
            ]
        else:
            self._sampled = _documents(rows, NUM_SAMPLES) if config.sample_every else []

    def samples(self) -> tuple[Sample, ...]:
        """Return what the model says to the prompts; those of the eval rows have a reference."""
        return tuple(self._answers(self._sampled, self._config.sample_tokens))

    def metrics(self) -> dict[str, float]:
        """Return exact_match, rouge_l and the metrics asked for, means over train.eval_generate."""
        if not self._measured:
            return {}
        task = self._task
        if isinstance(task, Seq2Seq):
            most = task.max_target
        else:
            most = longest_answer(task, self._measured)
        answers = self._answers(self._measured, most)
        return self.measured([(each.completion, each.reference or "") for each in answers])

    def measured(
        self, said: Sequence[tuple[str, str]], name: str = "exact_match"
    ) -> dict[str, float]:
        """Return means over answers and their references: the share that is equal, by `name`, and
        each metric."""
        found = {name: sum(a.strip() == b.strip() for a, b in said) / len(said)}
        for name, metric in list(self._metrics.items()):
            try:
                found[name] = sum(float(metric(*pair)) for pair in said) / len(said)
            except Exception as error:  # a metric of one's own costs itself, not the run
                del self._metrics[name]
                text = f"The metric {name} failed and is left out from here on: {error!r}"
                self._on_event(Notice(text))
        return found

    def _prompt(self, text: str, where: str) -> Any:
        """Return a prompt of the recipe as a row; its answer is not known."""
        task = self._task
        try:
            if isinstance(task, Seq2Seq):
                counts = Counter[str]()
                row = task.row_encoder.encode(Completion(text, ".", where), counts)
                if row is None:
                    raise DataError("it is empty.")
                if counts["cut sources"]:
                    raise DataError("it is too long.", found=f"{task.max_source} tokens are read.")
                return replace(row, target="")
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
        if isinstance(self._task, Seq2Seq):
            return self._translated(self._task, rows, max_new_tokens)
        size = self._batch_size
        return completions(self._base, self._task, rows, max_new_tokens, batch_size=size)

    def _translated(
        self, task: Seq2Seq, rows: Sequence[PairRow], max_new_tokens: int
    ) -> list[Sample]:
        with evaluating(self._base.model):
            answers = task.answers(self._base.model, rows, max_new_tokens=max_new_tokens)
        return [
            Sample(
                prompt=str(task.tokenizer.decode(row.input_ids, skip_special_tokens=True)),
                completion=answer,
                reference=row.target or None,
                source=row.source,
            )
            for row, answer in zip(rows, answers, strict=True)
        ]


def _documents(rows: Sequence[Any], number: int) -> list[Any]:
    """Return the first documents with something before their answer, packed rows taken apart.

    Of a comparison it is the chosen answer; one that is not wanted is no reference.
    """
    found: list[Any] = []
    for row in rows:
        if len(found) >= number:
            break
        if isinstance(row, Compared):
            found += [] if row.wanted is False else _apart(row.documents[0])
        else:
            found += _apart(row) if isinstance(row, Row) else [row]
    return found[:number]


def _apart(row: Row) -> list[Row]:
    """Return the documents of a row in which something stands before the answer."""
    documents, start = [], 0
    for length in row.lengths:
        ids, labels = row.input_ids[start : start + length], row.labels[start : start + length]
        if labels[0] == IGNORE and any(label != IGNORE for label in labels):
            documents.append(Row(ids, labels, (length,), row.source))
        start += length
    return documents
