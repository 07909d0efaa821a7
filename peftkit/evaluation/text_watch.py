"""Samples and metrics of generated completions while a model trains.

Completions are greedy: they are comparable between steps, and leave the run's random generators
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from peftkit.base.load import Base
from peftkit.errors import DataError, RunError
from peftkit.events import Listener, Notice, Progress, Sample, ignore
from peftkit.execution.world import Rows
from peftkit.inference.engine import AnswerTooLarge
from peftkit.settings import TrainConfig
from peftkit.tasks.completions import CompletingTask
from peftkit.tasks.metrics import rouge_l

NUM_SAMPLES = 3
"""Eval rows to sample without train.sample_prompts."""
BATCH_SIZE = 16
Metric = Callable[[str, str], float]
"""Maps a completion and its reference to a number."""


class TextWatch:
    """Generates samples, and metrics of completions of eval rows.

    Args:
        rows: The eval rows, packed or not.
        metrics: More metrics by name, besides exact_match and rouge_l; reported as means over rows.

    Raises:
        DataError: A prompt is empty, or longer than the model reads.
    """

    def __init__(
        self,
        base: Base,
        task: CompletingTask,
        rows: Rows,
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
        """Return completions of train.sample_prompts, or of the first eval rows."""
        prompts = self._prompts or [document for _, document in self._documents(NUM_SAMPLES)]
        return tuple(self._answers(prompts, self._config.sample_tokens))

    def metrics(self) -> dict[str, float]:
        """Return exact_match, rouge_l and the user's metrics over train.eval_generate rows."""
        if not (documents := self._documents(self._config.eval_generate or 0)):
            return {}
        answers = self._answers([document for _, document in documents], None)
        pairs = [(answer.completion, answer.reference or "") for answer in answers]
        means = self._task.answer_metrics(pairs, [row for row, _ in documents])
        for name, metric in list(self._metrics.items()):
            try:
                values = [float(metric(*pair)) for pair in pairs]
                means[name] = sum(values) / len(values)
            except Exception as error:  # a user's metric must not end the run
                del self._metrics[name]
                text = f"The metric {name} failed and is left out from here on: {error!r}"
                self._on_event(Notice(text))
        return means

    def _documents(self, number: int) -> list[tuple[object, object]]:
        """Return the first documents of the eval rows with an answer, each with its row."""
        pairs = list[tuple[Any, Any]]()
        for row in self._rows:
            if len(pairs) >= number:
                break
            pairs += [(row, document) for document in self._task.prompts(row)]
        return pairs[:number]

    def _prompt(self, text: str, where: str) -> Any:
        """Return a prompt of the recipe as a row without an answer."""
        try:
            return self._task.prompt_row(self._base.model, text, where)
        except DataError as error:
            raise DataError(
                f"Cannot use {where}: {error.problem}", found=error.found, fix=error.fix
            ) from None

    def _answers(self, rows: Rows, max_new_tokens: int | None) -> list[Sample]:
        """Return the completions of rows.

        Raises:
            RunError: Memory ran out for a single row.
        """
        self._on_event(Progress("Answering eval rows", 0, len(rows)))
        try:
            return self._task.answers(
                self._base.model,
                rows,
                max_new_tokens=max_new_tokens,
                batch_size=BATCH_SIZE,
                on_fewer=self._report_fewer,
            )
        except AnswerTooLarge as error:
            raise RunError(
                error.problem,
                found=error.found,
                fix="Leave out train.sample_every and train.eval_generate; peftkit generate and "
                "eval answer afterwards.",
            ) from None

    def _report_fewer(self, number: int) -> None:
        text = f"Memory ran out while text was generated: {number} prompts at a time."
        self._on_event(Notice(f"{text} Training is not affected."))
