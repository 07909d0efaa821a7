"""Tasks with losses over whole documents, and steps on answers that their model samples.

The prompts, seeds and answers of a step are a function of the run's seed, the step and the
weights. They are not saved; a resumed run generates them again.

Shapes: n answer tokens of a batch.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.pack import Row, answered_row, collate, rounded_up
from peftkit.errors import ConfigError, RunError
from peftkit.events import Notice, RolledOut, ScoredAnswer
from peftkit.execution import rng
from peftkit.forward.loss import token_log_probs
from peftkit.forward.padding_free import num_positions
from peftkit.forward.probes import check_causal
from peftkit.inference.engine import MAX_ROWS, Limits
from peftkit.inference.generate import ModelSampler, SampledAnswer
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.model.modes import adapters_off, evaluating
from peftkit.tasks.batches import OnDevice
from peftkit.tasks.completions import CompletingTask
from peftkit.tasks.row_loader import exact_length
from peftkit.tasks.run_hooks import Reference, Run, RunHooks
from peftkit.tasks.tokens import TokenTask

MAX_EMPTY = 20
"""Number of consecutive steps without rows to train on that end the run."""
CHECKED_PROMPTS, CHECKED_TOKENS = 2, 16
"""Prompts, and tokens of their answers, by which sampler and trainer are compared."""
SMALL = 0.02
"""Largest difference of a log-probability in nats that rounding explains."""


class DocumentTask(RunHooks, CompletingTask, TokenTask):
    """A task whose rows are documents to compare: the likelihood of each answer decides the loss.

    Attributes:
        reference: The model before training; by default the base without an adapter.

    Raises:
        BaseError: The model is not causal.
        DataError: A chat template or length is invalid.
    """

    predicts_tokens: ClassVar[bool] = False

    def build(self, model: nn.Module) -> None:
        check_causal(model)
        super().build(model)
        self.rows.max_length = exact_length(model, self.tokenizer, self.rows.data.max_length)
        self.reference = Reference(partial(adapters_off, model))

    def set_reference(self, reference: Reference) -> None:
        self.reference = reference

    def positions(self, lengths: Sequence[int], shared: int = 0) -> int:
        """Return how many positions documents take in one batch.

        Args:
            shared: Repeated tokens of common prefixes.
        """
        padded = len(lengths) * rounded_up(max(lengths))
        attention = self.layout.attention
        if attention is None or not attention.can_share(max(lengths), sum(lengths)):
            return padded
        if attention.takes_spans:
            return sum(lengths) - shared
        return min(padded, num_positions(lengths) - shared)

    def documents(self, documents: Sequence[Row]) -> dict[str, Tensor]:
        """Return documents as a batch, padding-free if that is faster.

        document (n,): the index of the document that a target token is in.
        """
        return self.layout.unpadded(self.padded(documents))

    def padded(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return documents as a batch, padded on the right."""
        batch = collate(rows, self.pad_id, self.rows.max_length)
        return {**batch, "document": batch["target_index"] // batch["input_ids"].shape[1]}

    def token_log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probability of each answer token (n,), in fp32."""
        targets = batch["target_index"], batch["targets"]
        with self.model_inputs(model, batch) as inputs:
            return token_log_probs(model, self.head, inputs, *targets)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The answers to the prompts of a step, on one process.

    Attributes:
        rows: Rows to train on, possibly none.
        metrics: Means over the answers; the same names on every process.
        answers: The answers and their rewards.
    """

    rows: Sequence[Any]
    metrics: Mapping[str, float]
    answers: tuple[ScoredAnswer, ...]


class OnPolicyTask(DocumentTask):
    """A task with optimizer steps on answers that the trained model samples.

    Attributes:
        stops: Tokens that end an answer; `build` sets them.
        updates: Optimizer steps with the same answers.
        needs_log_probs: Whether the loss needs `add_log_probs`.
    """

    stops: Sequence[int]
    updates = 1
    needs_log_probs = False
    _empty_steps, _is_sampler_checked = 0, False

    @abstractmethod
    def roll_out(
        self, prompts: Sequence[Any], seeds: Sequence[int] | None, sampler: ModelSampler
    ) -> Rollout:
        """Sample answers to prompts, with a seed for each prompt or greedily, and score them."""

    def add_log_probs(
        self, model: nn.Module, rows: Sequence[Any], batch: Mapping[str, Tensor]
    ) -> None:
        """Store further log-probabilities with the rows of a batch, before a step."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None,
        sampler: ModelSampler,
        number: int = 1,
    ) -> list[list[SampledAnswer]]:
        """Return `number` answers to each prompt; greedy ones where there are no seeds."""
        return sampler.answers(
            prompts,
            drawn_seeds(seeds, number),
            max_new_tokens=self.config.max_new_tokens,
            stops=self.stops,
        )

    def sampler(self, model: nn.Module) -> ModelSampler:
        """Return the sampler of a model."""
        self.layout.forget()
        return ModelSampler(model, self.tokenizer, MAX_ROWS)

    def check_alone(self, run: Run) -> None:
        """Check that each process can generate answers alone.

        Raises:
            ConfigError: The base is sharded over processes.
        """
        if run.parallel.in_lockstep:
            raise ConfigError(
                "training on the model's own answers needs the whole base on each process",
                fix="Set train.shard: none.",
            )

    def before_step(self, rows: Sequence[Any], run: Run) -> Sequence[Sequence[Any]]:
        """Return the rows of the optimizer steps that train on answers to prompts.

        Raises:
            RunError: A reward function failed, or all answers have had equal rewards for too long.
        """
        began = time.perf_counter()
        number = run.state.step
        seeds = [rng.seed_of(run.config.seed, number, index) for index in run.indices]
        rollout, means = self.rolled_out(rows, seeds, run)
        seconds = time.perf_counter() - began
        run.say(RolledOut(number + 1, seconds, rollout.answers))
        run.figures |= means | {"rollout_seconds": seconds}
        if not self._is_sampler_checked and number & (number - 1) == 0:  # steps 0, 1, 2, 4, ...
            # rows of distillation also have the teacher's document
            ids = [getattr(row, "documents", (row,))[0].input_ids for row in rows]
            with run.parallel.together():
                checked = self.check_sampler(ids, run)
            self._is_sampler_checked = run.world.max(checked) > 0
        if not run.world.max(len(rollout.rows)):
            self._count_empty(run.figures)
            return []
        self._empty_steps = 0
        if self.needs_log_probs:
            autocast = run.world.autocast()
            with run.parallel.together(), torch.no_grad(), evaluating(run.model), autocast:
                for part in run.micro_batches(rollout.rows):
                    batch = OnDevice(self.collate(part), run.world.device)
                    self.add_log_probs(run.model, part, batch)
        return [rollout.rows] * self.updates

    @torch.no_grad()
    def check_sampler(self, prompts: Sequence[Sequence[int]], run: Run) -> bool:
        """Check that the policy which samples rollouts is the policy that is trained.

        Reports how sampler and trainer differ; returns whether the adapter is large enough to tell.

        Args:
            prompts: Tokens of this process's prompts, possibly none.

        Raises:
            RunError: The sampler's log-probabilities are the base's, and the trainer's are not.
        """
        if not prompts:
            return False
        ids = [list(prompt) for prompt in prompts[:CHECKED_PROMPTS]]
        self.layout.forget()
        with evaluating(run.model), run.world.autocast():
            sampling = Sampling(max_new_tokens=CHECKED_TOKENS, stops=tuple(self.stops))
            with open_engine(run.model, self.tokenizer, Limits(rows=len(ids))) as engine:
                groups = engine.answers(ids, sampling, log_probs=True)
            chosen = [group[0].chosen for group in groups]
            sampled = torch.tensor([token.log_prob for tokens in chosen for token in tokens])
            rows = [
                answered_row(start, [token.token for token in tokens], "a rollout")
                for start, tokens in zip(ids, chosen, strict=True)
            ]
            batch = OnDevice(self.padded(rows), run.world.device)
            trained = self.token_log_probs(run.model, batch).cpu()
            with adapters_off(run.model):
                bare = self.token_log_probs(run.model, batch).cpu()
        self.layout.forget()
        differs, moved = _largest(sampled, trained), _largest(trained, bare)
        if moved <= SMALL:
            return False
        if differs > SMALL and _largest(sampled, bare) < differs / 4:
            raise RunError(
                "rollouts are sampled from the base, not from the adapter",
                found=f"Log-probabilities of sampler and trainer differ by up to {differs:.3g} "
                f"nats, and those of sampler and base by {_largest(sampled, bare):.3g}.",
                fix="Report this with the output of: peftkit env",
            )
        text = f"Sampler and trainer differ by up to {differs:.2g} nats in {len(sampled)} tokens"
        run.say(Notice(f"{text}; the adapter changes them by up to {moved:.2g}."))
        return True

    def rolled_out(
        self, prompts: Sequence[object], seeds: Sequence[int] | None, run: Run
    ) -> tuple[Rollout, dict[str, float]]:
        """Call `roll_out` in eval mode; return the means over all processes too.

        The random generators are restored.
        """
        before = rng.capture(run.world.device)
        try:
            with run.parallel.together(), evaluating(run.model):
                rollout = self.roll_out(prompts, seeds, self.sampler(run.model))
        finally:
            rng.restore(before, run.world.device)
        number = len(rollout.answers)
        sums = torch.tensor([number, *(value * number for value in rollout.metrics.values())])
        total, *summed = run.world.sum(sums.to(run.world.device)).tolist()
        values = (value / total for value in summed)
        return rollout, dict(zip(rollout.metrics, values, strict=True))

    def _count_empty(self, figures: Mapping[str, float]) -> None:
        self._empty_steps += 1
        if self._empty_steps >= MAX_EMPTY:
            raise RunError(
                f"{MAX_EMPTY} steps in a row had nothing to train on: all answers to a prompt have "
                "the same reward",
                found=f"Their mean reward is {figures['reward']:.4g}; {figures['cut']:.0%} were "
                "cut at task.max_new_tokens.",
                fix="Use a reward that differs between answers, or easier prompts; or raise "
                "task.answers or task.max_new_tokens.",
            )


def drawn_seeds(seeds: Sequence[int] | None, number: int) -> list[list[int]] | None:
    """Return the seeds of `number` answers to each prompt; None: they are greedy."""
    if seeds is None:
        return None
    return [[rng.seed_of(seed, n) for n in range(number)] for seed in seeds]


def _largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
