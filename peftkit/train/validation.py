"""Evaluations and samples during training: the eval loss, the best step, early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peftkit.errors import DataError
from peftkit.events import EvalDone, Notice, Sampled
from peftkit.execution import rng
from peftkit.execution.parallel import Part
from peftkit.figures import not_better, score_of
from peftkit.forward.loss import perplexity
from peftkit.model.blocks import is_sharded
from peftkit.model.modes import begin_training
from peftkit.tasks.batches import batches_that_fit, split_micro_batches
from peftkit.train.batches import on_device
from peftkit.train.step import Trainer

if TYPE_CHECKING:
    from peftkit.evaluation.drift import Drift
    from peftkit.evaluation.text_watch import TextWatch


class Evaluator:
    """Computes the eval loss, without effect on training: the generators are restored.

    Attributes:
        rows: This process's share of the eval rows.
        batch_size: Maximum rows of a batch; halved when memory runs out.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.run, self.task = trainer, trainer.run, trainer.task
        self.batch_size = self.run.config.batch_size
        world = self.run.world
        self.rows = self.run.eval_rows[world.rank :: world.world_size]

    def evaluate(self) -> dict[str, float] | None:
        """Return `figures` and the task's metrics; None if a process got a signal to stop."""
        world = self.run.world
        before = rng.capture(world.device)
        self.run.model.eval()
        try:
            with torch.no_grad():
                sums, targets = self._sums()
        finally:
            begin_training(self.run.model)
            rng.restore(before, world.device)
        stopped = float(self.run.stop.signum != 0)
        counts = on_device([targets, stopped], world.device)
        targets, stopped, *summed = world.sum(torch.cat([counts, sums])).tolist()
        if stopped:
            return None
        if targets == 0:
            raise DataError("the eval rows have no target tokens: all their labels are masked")
        loss, *means = (figure / targets for figure in summed)
        return self.figures(loss) | self.task.eval_means(means)

    def figures(self, loss: float) -> dict[str, float]:
        """Return a mean loss, and its perplexity where the task has one."""
        if not self.task.predicts_tokens:
            return {"loss": loss}
        return {"loss": loss, "perplexity": perplexity(loss)}

    def _sums(self) -> tuple[Tensor, int]:
        """Return the sums of `Task.loss` over this process's rows, and their targets."""
        run, trainer, task = self.run, self.trainer, self.task
        sums = torch.zeros(1 + len(task.metric_names), device=run.world.device)
        num_targets = 0

        def compute(part: Part) -> tuple[Tensor, int]:
            (batch,) = trainer.prefetcher.batches([part])
            return trainer.sums(batch), task.num_targets(batch)

        def use_fewer(size: int) -> None:
            self.batch_size = size

        for rows in run.hooks.before_step(self.rows, run):
            for _, (batch_sums, number), is_real in batches_that_fit(
                rows,
                self.batch_size,
                self._split,
                compute,
                parallel=run.parallel,
                on_fewer=use_fewer,
                ahead=lambda part: trainer.prefetcher.prefetch([part]),
            ):
                if is_real:
                    sums += batch_sums
                    num_targets += number
                if run.stop.signum and not run.parallel.in_lockstep:
                    break
        return sums, num_targets

    def _split(self, rows: Sequence[Any], size: int) -> list[Part]:
        tokens, task = self.trainer.fitting.requested.tokens, self.task
        return split_micro_batches(rows, task.num_positions, size, tokens, task.bucket_key)


class Validation:
    """Evaluations, samples and early stopping of a run.

    Args:
        watch: Generates samples and completions of eval rows, if requested.
        drift: Measures train.drift, if requested.
    """

    def __init__(
        self, trainer: Trainer, num_steps: int, watch: TextWatch | None, drift: Drift | None
    ) -> None:
        self.trainer, self.run, self.num_steps = trainer, trainer.run, num_steps
        self.evaluator, self.drift = Evaluator(trainer), drift
        self._measured: dict[str, float] = {}
        # with a sharded base all processes generate
        generates = self.run.world.is_main or is_sharded(self.run.model)
        self.watch = watch if generates else None

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or the run has stopped early."""
        state, early_stopping = self.run.state, self.run.config.early_stopping
        enough = early_stopping is not None and state.worse_evals >= early_stopping.patience
        return enough or state.is_ended or state.step >= self.num_steps

    def evaluate(self) -> bool:
        """Evaluate, and emit EvalDone; False if a process got a signal to stop."""
        run, state, batch_size = self.run, self.run.state, self.evaluator.batch_size
        with self.trainer.blocks.eagerly():
            metrics = run.hooks.evaluate(self.evaluator.rows, run)
            if metrics is None:
                metrics = self.evaluator.evaluate()
        if (fewer := self.evaluator.batch_size) != batch_size:
            text = f"Memory ran out: evaluations use {fewer} rows at a time instead of {batch_size}"
            run.say(Notice(f"{text}. Training is not affected."))
        if metrics is None:
            return False
        if self.drift is not None:
            metrics |= self._measure(self.drift)
        loss = metrics["loss"]
        finite = math.isfinite(loss)
        if not finite:
            self.run.say(Notice(f"The eval loss after step {state.step} is {loss}."))
        score = score_of(metrics, run.config.best_metric)
        if state.best_metric != run.config.best_metric:  # changed for a resumed run
            state.best_metric, state.best_step, state.best_loss = run.config.best_metric, None, None
            state.best_score, state.patience_loss, state.worse_evals = None, None, 0
        lowest = state.best_loss if state.best_metric == "loss" else state.best_score
        best = state.step > 0 and math.isfinite(score) and (lowest is None or score < lowest)
        best = best and (self.drift is None or self.drift.is_within_limit(metrics))
        if best:
            state.best_step, state.best_loss, state.best_score = state.step, loss, score
        state.evaluated_step, state.eval_loss = state.step, loss if finite else None
        if self.watch is not None:
            with self.trainer.blocks.eagerly():
                self._gather()
                metrics |= self.watch.metrics()
        self.run.say(EvalDone(state.step, metrics, best))
        self._judge(score)
        return True

    @property
    def figures(self) -> dict[str, float]:
        """The last evaluation's loss, perplexity and drift, by name; empty without one."""
        loss = self.run.state.eval_loss
        return {} if loss is None else self.evaluator.figures(loss) | self._measured

    def sample(self) -> None:
        """Emit completions of the sample prompts."""
        if self.watch is not None:
            with self.trainer.blocks.eagerly():
                self._gather()
                self.run.say(Sampled(self.run.state.step, self.watch.samples()))

    def _gather(self) -> None:
        """Gather the weights of a sharded base outside of its blocks, for generation."""
        if is_sharded(self.run.model):
            from peftkit.base.sharding import gather

            gather(self.run.model)

    def _measure(self, drift: Drift) -> dict[str, float]:
        """Return the mean of the processes' measurements, which training does not notice."""
        world = self.run.world
        before = rng.capture(world.device)
        with self.trainer.blocks.eagerly():
            self._gather()
            measured = drift.measure()
        rng.restore(before, world.device)
        sums = world.sum(on_device([*measured.values()], world.device)) / world.world_size
        self._measured = dict(zip(measured, sums.tolist(), strict=True))
        return self._measured

    def _judge(self, score: float) -> None:
        """Count evaluations without improvement, for early stopping."""
        state, early_stopping = self.run.state, self.run.config.early_stopping
        if early_stopping is None:
            return
        lowest = math.inf if state.patience_loss is None else state.patience_loss
        if math.isfinite(score) and score < lowest - early_stopping.min_delta:
            state.patience_loss, state.worse_evals = score, 0
        else:
            state.worse_evals += 1
        if self.is_over and state.step < self.num_steps:
            lowest = math.inf if state.patience_loss is None else state.patience_loss
            where = f"Stopped early after step {state.step} of {self.num_steps}: the eval"
            text = not_better(self.run.config.best_metric, lowest)
            self.run.say(Notice(f"{where} {text} in {state.worse_evals} evaluations."))
