"""What the training loop asks of a task; peftkit.tasks has those that there are."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from peftkit.errors import ConfigError
from peftkit.events import Listener, Sample, ScoredAnswer
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.signals import StopRequest
from peftkit.execution.world import World
from peftkit.kernels.context import Context
from peftkit.tasks.lockstep import LockstepForward


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite beyond the range of floats."""
    return math.exp(loss) if loss < 709 else math.inf


@dataclass(frozen=True, slots=True)
class SetupContext:
    """What a task may use before the first step.

    Attributes:
        rows: All rows of the run, eval rows last; the same on every process.
        num_train: How many of them are trained on.
        in_step: Says what a process runs for the others, where each has a part of the base.
        folder: The run's; the main process alone writes into it.
        say: Hears what happens, on the main process alone.
        sampler: Has the model answer prompts; None where `fit` was called without one.
    """

    rows: Sequence[Any]
    num_train: int
    ranks: World
    in_step: LockstepForward
    folder: Path
    stop: StopRequest
    say: Listener
    sampler: Sampler | None = None


class Task(Protocol):
    """How rows become batches, and batches a loss.

    A row may say its `source` ("train.jsonl:7"), its `input_ids` and, where an encoder reads these,
    its `num_decoder_tokens`. Several rows have together as many targets as they have one by one,
    and a summed loss that is the sum of theirs, given what they need to know of the whole step.
    """

    metric_names: tuple[str, ...] = ()
    """What `loss_and_metric_sums` returns beside the loss."""
    needs_whole_step: ClassVar[bool] = False
    """Whether a row's loss depends on other rows of the step; see `row_values`."""

    draws_in_collate: bool = False
    """Whether `collate` draws from torch's own generator; others are collated a step ahead."""

    makes_rows: bool = False
    """Whether it is a `RolloutTask`."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a resumed run must have in common with the saved one beside the task's config."""
        return {}

    def in_parts(self, context: Context) -> Task:
        """Return the task on rows whose tokens lie on several processes.

        Raises:
            ConfigError: There is none.
        """
        raise ConfigError(
            f"train.context_parallel does not go with {type(self).__name__}",
            fix="Set train.context_parallel: 1.",
        )

    @property
    def predicts_tokens(self) -> bool:
        """Whether the loss is that of each token of a text: its exp is then a perplexity."""

    @property
    def paths(self) -> Mapping[str, str]:
        """Chosen execution paths, for the run header."""

    def training(
        self, model: nn.Module, plan: ExecutionPlan | None = None
    ) -> AbstractContextManager[object]:
        """Return a context in which the model is trained, with the attention of a plan."""

    def setup(self, model: nn.Module, context: SetupContext) -> None:
        """Compute what is computed once, before the first step or after a resume."""
        return None

    @abstractmethod
    def collate(self, rows: Sequence[Any]) -> Mapping[str, Tensor]:
        """Return rows as a batch, on the CPU."""

    def num_positions(self, rows: Sequence[Any]) -> int:
        """Return how many tokens the model reads for these rows collated, padding included."""

    def bucket_key(self, row: Any) -> Any:
        """Return what all rows that are collated together have in common; None: nothing."""
        return None

    @abstractmethod
    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number that the summed loss is divided by; must not wait for the GPU."""

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over the targets of a batch, in fp32."""
        return self.loss_and_metric_sums(model, batch)[0]

    def loss_and_metric_sums(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (1 + num_metrics,): the summed loss, and what is told beside it, summed too.

        A task says this or `loss_sum`.
        """
        return self.loss_sum(model, batch)[None]

    @property
    def num_metrics(self) -> int:
        """How many `metric_names` there are."""
        return len(self.metric_names)

    def metric_means(self, means: Sequence[float]) -> dict[str, float]:
        """Return metrics by name, from the means of `metric_names`."""
        return dict(zip(self.metric_names, means, strict=True))

    def row_values(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (rows, K): what the losses of other rows need to know of each row; no gradient.

        Asked where a step's rows do not go through the model at once. Its batches then have
        "step_values" (N, K), those of all N rows of the step on all processes, and "step_index"
        (rows,), where among them the batch's own rows are. A batch without them is all there is.
        """
        raise TypeError(f"{type(self).__name__} takes each row alone")


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A model's answer: `ids` with the token that ended it; one that is cut has none."""

    ids: tuple[int, ...]
    is_cut: bool


class Sampler(Protocol):
    """Has the model answer prompts, as it is now."""

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]] | None,
        *,
        max_new_tokens: int,
        stops: Sequence[int],
        model: Any = None,
    ) -> list[list[SampledAnswer]]:
        """Return answers to each prompt: one for each of its seeds; without seeds a greedy one.

        An answer depends on its prompt, its seed and the model alone.

        Args:
            model: By default the one that is trained.
        """


@dataclass(frozen=True, slots=True)
class Rollout:
    """What became of the prompts of a step, on one process.

    Attributes:
        rows: What is learnt from, possibly nothing.
        metrics: Means over its answers; the same names on every process.
        answers: What was said, and what it was worth.
    """

    rows: Sequence[Any]
    metrics: Mapping[str, float]
    answers: tuple[ScoredAnswer, ...]


class RolloutTask(Task, Protocol):
    """A task whose rows are prompts: what a step learns from, the model says in that step."""

    updates: int
    """Optimizer steps with the same answers."""
    evaluates_answers: bool
    """Whether an evaluation, too, is of the model's answers."""
    needs_log_probs: bool
    """Whether a step needs `log_probs`."""
    stop_entropy: float | None
    """The run ends once its figure `entropy` is lower."""

    def roll_out(
        self, prompts: Sequence[Any], seeds: Sequence[int] | None, sampler: Sampler
    ) -> Rollout:
        """Have the model answer prompts, and judge the answers.

        Args:
            seeds: Of each prompt; None: greedy answers, of which nothing is learnt.

        Raises:
            RunError: A reward function failed.
        """

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return log-probabilities that a step needs beside the model's own."""

    def remember(self, rows: Sequence[Any], found: Mapping[str, Tensor]) -> None:
        """Keep with the rows of a batch what `log_probs` returned of them."""


class GenerationEvaluator(Protocol):
    """What the model generates during training: samples, and measured answers."""

    def samples(self) -> tuple[Sample, ...]:
        """Return the model's answers to the sample prompts."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of generated answers to the eval rows; empty if not asked for."""
