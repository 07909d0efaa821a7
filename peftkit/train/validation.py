"""Evaluations and samples while a run goes on: the mean loss of the eval rows, the best step, and
whether it still improves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from peftkit.base.sharding import gathered, is_sharded
from peftkit.errors import DataError
from peftkit.events import EvalDone, Event, Notice, Sampled
from peftkit.execution import rng
from peftkit.execution.out_of_memory import release_memory
from peftkit.model.modes import begin_training
from peftkit.tasks.batches import too_large
from peftkit.tasks.lockstep import GlobalBatchValues, Pass
from peftkit.tasks.training import GenerationEvaluator, perplexity
from peftkit.train.batches import on_device
from peftkit.train.rollouts import Rollouts
from peftkit.train.trainer import Trainer


class Evaluator:
    """Measures the loss; leaves the generators as they were, so that training takes no notice.

    Attributes:
        batch_size: Rows at once; halved when memory runs out, without effect on training.
    """

    def __init__(self, learner: Trainer, rows: Sequence[Any]) -> None:
        self.learner, self.model, self.task = learner, learner.model, learner.task
        self.ranks, self.in_step, self.stop = learner.ranks, learner.in_step, learner.stop
        self.batch_size = learner.config.batch_size
        self._max_tokens = learner.asked.tokens
        self.rows = rows[self.ranks.dp_rank :: self.ranks.dp_size]

    def run(self) -> dict[str, float] | None:
        """Return what `figures` does, or None if some process was asked to stop meanwhile."""
        before = rng.capture(self.ranks.device)
        self.model.eval()
        try:
            with torch.no_grad():
                sums, targets = self._sums()
        finally:
            begin_training(self.model)
            rng.restore(before, self.ranks.device)
        stopped = float(self.stop.signum != 0)
        own = on_device([targets, stopped], self.ranks.device)
        targets, stopped, *summed = self.ranks.sum(torch.cat([own, sums])).tolist()
        if stopped:
            return None
        if targets == 0:
            raise DataError("the eval rows have nothing to measure: all their labels are masked")
        loss, *means = (each / targets for each in summed)
        return self.figures(loss) | self.task.metric_means(means)

    def figures(self, loss: float) -> dict[str, float]:
        """Return a mean loss, and its perplexity where the task has one."""
        if not self.task.predicts_tokens:
            return {"loss": loss}
        return {"loss": loss, "perplexity": perplexity(loss)}

    def _sums(self) -> tuple[Tensor, int]:
        """Return what is summed of all rows, and their targets; with fewer at a time until it fits.

        Where losses depend on each other all rows are looked at first.
        """
        known = None
        while self.task.needs_whole_step and known is None:
            known = self.in_step.step_values(self.learner.row_values, self.rows, self._passes())
            if known is None:
                self._take_fewer(known)
        while (found := self._try(self._passes(), known)) is None:
            self._take_fewer(known)
        return found

    def _passes(self) -> list[Pass]:
        parts = self.learner.cut(self.rows, self.batch_size, self._max_tokens)
        return self.in_step.padded_passes(parts)

    def _take_fewer(self, known: GlobalBatchValues | None) -> None:
        """Halve the rows at a time.

        Raises:
            RunError: One does not fit.
        """
        release_memory()
        most = max((len(part) for part, _ in self._passes()), default=1)
        if most == 1:
            longest = max(self.rows, key=lambda row: self.task.num_positions([row]), default=None)
            passes = {id(row): [([row], True)] for row in self.rows}
            raise too_large(
                longest, self.rows, lambda row: self._try(passes[id(row)], known) is not None
            )
        self.batch_size = most // 2

    def _try(
        self, passes: Sequence[Pass], known: GlobalBatchValues | None
    ) -> tuple[Tensor, int] | None:
        """Return what is summed of rows, and their targets; None if memory ran out.

        Args:
            known: What was seen of all rows, where losses depend on each other.
        """
        sums, targets = torch.zeros(1 + self.task.num_metrics, device=self.ranks.device), 0
        feed, coming = self.learner.feed, [rows for rows, _ in passes[1:]]
        try:
            for rows, is_real in passes:
                if self.stop.signum and not self.in_step.needed:
                    break
                (batch,) = feed.batches([rows])
                if coming:
                    feed.prefetch([coming.pop(0)])
                if known is not None:
                    batch = known.given_to(batch, rows)
                found = self.learner.sums(batch)
                if is_real:
                    sums += found
                    targets += self.task.num_targets(batch)
        except Exception as error:
            if not self.in_step.ran_out(error):
                raise
            return None
        return sums, targets


class Validation:
    """Evaluates a run, and counts evaluations without improvement.

    Args:
        watch: What the model generates, if that is asked for.
        say: Hears what was found.
        rollouts: Of a task whose rows are the model's own answers, by which it is evaluated.
    """

    def __init__(
        self,
        learner: Trainer,
        evaluator: Evaluator,
        num_steps: int,
        watch: GenerationEvaluator | None,
        say: Callable[[Event], None],
        rollouts: Rollouts | None = None,
    ) -> None:
        self.rollouts = rollouts
        self.learner, self.evaluator, self.num_steps = learner, evaluator, num_steps
        # the main process generates, or all that share a base
        generates = learner.ranks.is_main or is_sharded(learner.model)
        self.watch, self.say = watch if generates else None, say

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or early stopping has seen enough."""
        state, asked = self.learner.state, self.learner.config.early_stopping
        enough = asked is not None and state.worse_evals >= asked.patience
        return enough or state.is_sure or state.step >= self.num_steps

    def evaluate(self) -> bool:
        """Evaluate, and emit EvalDone; False where some process was asked to stop meanwhile."""
        state, batch_size = self.learner.state, self.evaluator.batch_size
        with self.learner.blocks.eagerly():
            rollouts, rows = self.rollouts, self.evaluator.rows
            metrics = rollouts.evaluate(rows) if rollouts else self.evaluator.run()
        if (fewer := self.evaluator.batch_size) != batch_size:
            text = f"it goes on with {fewer} rows at a time instead of {batch_size}"
            self.say(Notice(f"Memory ran out in the evaluation: {text}. Training is not affected."))
        if metrics is None:
            return False
        loss = metrics["loss"]
        finite = math.isfinite(loss)
        if not finite:
            self.say(Notice(f"The eval loss after step {state.step} is {loss}."))
        best = state.step > 0 and finite and (state.best_loss is None or loss < state.best_loss)
        if best:
            state.best_step, state.best_loss = state.step, loss
        state.evaluated_step, state.eval_loss = state.step, loss if finite else None
        if self.watch is not None:
            with self.learner.blocks.eagerly(), gathered(self.learner.model):
                metrics |= self.watch.metrics()
        self.say(EvalDone(state.step, metrics, best))
        self._judge(loss)
        return True

    @property
    def figures(self) -> dict[str, float]:
        """What the last evaluation found, by name; empty without one."""
        loss = self.learner.state.eval_loss
        if loss is None:
            return {}
        return {"loss": loss} if self.rollouts else self.evaluator.figures(loss)

    def sample(self) -> None:
        """Emit what the model says to the sample prompts."""
        if self.watch is not None:
            with self.learner.blocks.eagerly(), gathered(self.learner.model):
                self.say(Sampled(self.learner.state.step, self.watch.samples()))

    def _judge(self, loss: float) -> None:
        """Count evaluations without improvement, for early stopping."""
        state, asked = self.learner.state, self.learner.config.early_stopping
        if asked is None:
            return
        lowest = state.patience_loss
        if lowest is None or loss < lowest - asked.min_delta:
            state.patience_loss, state.worse_evals = loss, 0
        else:
            state.worse_evals += 1
        if self.is_over and state.step < self.num_steps:
            self.say(
                Notice(
                    f"Stopped early after step {state.step} of {self.num_steps}: the eval loss did "
                    f"not fall below {state.patience_loss:.4g} in {state.worse_evals} evaluations."
                )
            )
