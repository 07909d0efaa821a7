"""Evaluations and samples while a run goes on: the mean loss of the eval rows, the best step, and
whether it still improves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from peftkit.errors import DataError
from peftkit.events import EvalDone, Event, Notice, Sampled
from peftkit.train import rng
from peftkit.train.lockstep import GlobalBatchValues, Part, step_values
from peftkit.train.memory.out_of_memory import is_out_of_memory, release_memory, too_large
from peftkit.train.prefetch import on_device
from peftkit.train.rollouts import Rollouts
from peftkit.train.sharding import gathered, is_sharded
from peftkit.train.task import GenerationEvaluator, perplexity
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
        self._max_tokens = learner.config.tokens_at_once(self.ranks.device.type)
        self.rows = rows[self.ranks.dp_rank :: self.ranks.dp_size]

    def run(self) -> dict[str, float] | None:
        """Return what `figures` does, or None if some process was asked to stop meanwhile."""
        before = rng.capture(self.ranks.device)
        self.model.eval()
        try:
            with torch.no_grad():
                sums, targets = self._sums()
        finally:
            self.model.train()
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

    def _known(self) -> GlobalBatchValues | None:
        """Look at all rows first, where their losses depend on each other."""
        while self.task.needs_whole_step:
            try:
                passes = self.in_step.padded_passes(self._cut(self.rows))
                return step_values(self.learner.row_values, self.rows, passes, self.ranks)
            except Exception as error:
                if not is_out_of_memory(error) or self.batch_size == 1:
                    raise
                if self.in_step.needed:
                    raise self.in_step.out_of_memory() from None
            release_memory()
            self.batch_size //= 2
        return None

    def _sums(self) -> tuple[Tensor, int]:
        sums = torch.zeros(1 + self.task.num_metrics, device=self.ranks.device)
        targets, known = 0, self._known()
        pending = self.in_step.padded_passes(self._cut(self.rows))
        while pending and (self.in_step.needed or not self.stop.signum):
            rows, is_real = pending.pop(0)
            coming = [part for part, _ in pending[:1]]
            result = self._try(rows, coming, known)
            if not is_real:
                continue
            if result is None:
                release_memory()
                if len(rows) == 1:
                    raise too_large(rows[0], self.rows, lambda row: self._try([row]) is not None)
                self.batch_size = len(rows) // 2
                left = [row for part in (rows, *(part for part, _ in pending)) for row in part]
                pending = self.in_step.padded_passes(self._cut(left))
                continue
            sums += result[0]
            targets += result[1]
        return sums, targets

    def _cut(self, rows: Sequence[Any]) -> list[Part]:
        return self.learner.cut(rows, self.batch_size, self._max_tokens)

    def _try(
        self,
        rows: Sequence[Any],
        coming: Sequence[Sequence[Any]] = (),
        known: GlobalBatchValues | None = None,
    ) -> tuple[Tensor, int] | None:
        """Return what is summed of rows, and their targets; None if memory ran out.

        Args:
            coming: The rows after these: they may be collated meanwhile.
            known: What was seen of all rows, where losses depend on each other.
        """
        feed = self.learner.feed
        (batch,) = feed.batches([rows])
        if coming:
            feed.prefetch(coming)
        if known is not None:
            batch = known.given_to(batch, rows)
        try:
            return self.learner.sums(batch), self.task.num_targets(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self.in_step.needed:
                raise self.in_step.out_of_memory() from None
            return None


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
