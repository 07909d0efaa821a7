"""Evaluations and samples during training: the eval loss, the best step, early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peftkit.errors import DataError
from peftkit.events import EvalDone, Notice, Progress, Sampled
from peftkit.execution import rng
from peftkit.execution.world import Part, Rows
from peftkit.figures import not_better, score_of
from peftkit.forward.loss import perplexity
from peftkit.model.blocks import is_sharded
from peftkit.model.modes import begin_training
from peftkit.tasks.batches import batches_that_fit, split_micro_batches
from peftkit.tasks.run_hooks import Run
from peftkit.train.batches import on_device
from peftkit.train.step import Step

if TYPE_CHECKING:
    from peftkit.evaluation.drift import Drift
    from peftkit.evaluation.text_watch import TextWatch


class Validation:
    """Evaluations and samples of a run, without effect on training, and early stopping.

    Args:
        watch: Generates samples and completions of eval rows, if requested.
        drift: Measures train.drift, if requested.
    """

    def __init__(self, run: Run, step: Step, watch: TextWatch | None, drift: Drift | None) -> None:
        self.run, self.step, self.task, self.drift = run, step, run.task, drift
        # with a sharded base all processes generate
        self.watch = watch if run.world.is_main or is_sharded(run.model) else None
        self._batch_size = run.config.batch_size  # halved when memory runs out
        self._drift: dict[str, float] = {}  # of the last evaluation

    def evaluate(self) -> None:
        """Evaluate, and emit EvalDone; if a process got a signal to stop, only agree to stop."""
        run, state, batch_size = self.run, self.run.state, self._batch_size
        rows = run.eval_rows[run.world.rank :: run.world.world_size]  # of this process
        with self.step.eagerly():
            metrics = run.hooks.evaluate(rows, run)
            if metrics is None:
                metrics = self._mean_loss(rows)
        if self._batch_size != batch_size:
            text = f"evaluations use {self._batch_size} rows at a time instead of {batch_size}"
            run.say(Notice(f"Memory ran out: {text}. Training is not affected."))
        if metrics is None:
            run.agree_to_stop()
            return
        if self.drift is not None:
            self._drift = self._measure(self.drift)
            metrics |= self._drift
        loss = metrics["loss"]
        finite = math.isfinite(loss)
        if not finite:
            run.say(Notice(f"The eval loss after step {state.step} is {loss}."))
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
            with self._generating():
                metrics |= self.watch.metrics()
        run.say(EvalDone(state.step, metrics, best))
        self._judge(score)

    def sample(self) -> None:
        """Emit completions of the sample prompts."""
        if self.watch is not None:
            with self._generating():
                self.run.say(Sampled(self.run.state.step, self.watch.samples()))

    @property
    def figures(self) -> dict[str, float]:
        """The last evaluation's loss, perplexity and drift, by name; empty without one."""
        loss = self.run.state.eval_loss
        return {} if loss is None else self._with_perplexity(loss) | self._drift

    def _mean_loss(self, rows: Rows) -> dict[str, float] | None:
        """Return the loss and the task's metrics; None if a process got a signal to stop."""
        run = self.run
        before = rng.capture(run.world.device)
        run.model.eval()
        try:
            with torch.no_grad():
                sums, targets = self._sums(rows)
        finally:
            begin_training(run.model)
            rng.restore(before, run.world.device)
        counts = on_device([targets, run.stop.signum != 0], run.world.device)
        targets, stopped, *summed = run.world.sum(torch.cat([counts, sums])).tolist()
        if stopped:
            return None
        if targets == 0:
            raise DataError("the eval rows have no target tokens: all their labels are masked")
        loss, *means = (figure / targets for figure in summed)
        return self._with_perplexity(loss) | self.task.eval_means(means)

    def _with_perplexity(self, loss: float) -> dict[str, float]:
        """Return a mean loss, and its perplexity where the task has one."""
        if not self.task.predicts_tokens:
            return {"loss": loss}
        return {"loss": loss, "perplexity": perplexity(loss)}

    def _sums(self, rows: Rows) -> tuple[Tensor, int]:
        """Return the sums of `Task.loss` over rows, and the number of targets."""
        run, task, tokens = self.run, self.task, self.step.fitting.requested.tokens
        sums = torch.zeros(1 + len(task.metric_names), device=run.world.device)
        num_targets = 0

        def split(rows: Rows, size: int) -> list[Part]:
            return split_micro_batches(rows, task.num_positions, size, tokens, task.bucket_key)

        def use_fewer(size: int) -> None:
            self._batch_size = size

        done = 0
        for step_rows in run.hooks.before_step(rows, run):
            run.say(Progress("Evaluating", done, len(rows)))
            for part, (batch_sums, number), is_real in batches_that_fit(
                step_rows,
                self._batch_size,
                split,
                self.step.sums,
                parallel=run.parallel,
                on_fewer=use_fewer,
                ahead=lambda part: self.step.prefetcher.prefetch([part]),
            ):
                if is_real:
                    sums += batch_sums
                    num_targets += number
                    done += len(part)
                    run.say(Progress("Evaluating", done, len(rows)))
                if run.stop.signum and not run.parallel.in_lockstep:
                    break
        return sums, num_targets

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Run blocks eagerly within the context, and gather the weights of a sharded base."""
        with self.step.eagerly():
            if is_sharded(self.run.model):
                from peftkit.base.sharding import gather

                gather(self.run.model)
            yield

    def _measure(self, drift: Drift) -> dict[str, float]:
        """Return the mean of the processes' measurements, which training does not notice."""
        world = self.run.world
        before = rng.capture(world.device)
        with self._generating():
            measured = drift.measure()
        rng.restore(before, world.device)
        sums = world.sum(on_device([*measured.values()], world.device)) / world.world_size
        return dict(zip(measured, sums.tolist(), strict=True))

    def _judge(self, score: float) -> None:
        """Count evaluations without improvement, for early stopping."""
        run, state, early_stopping = self.run, self.run.state, self.run.config.early_stopping
        if early_stopping is None:
            return
        lowest = math.inf if state.patience_loss is None else state.patience_loss
        if math.isfinite(score) and score < lowest - early_stopping.min_delta:
            state.patience_loss, state.worse_evals = score, 0
        else:
            state.worse_evals += 1
        if run.is_over and state.step < run.num_steps:
            lowest = math.inf if state.patience_loss is None else state.patience_loss
            where = f"Stopped early after step {state.step} of {run.num_steps}: the eval"
            text = not_better(run.config.best_metric, lowest)
            run.say(Notice(f"{where} {text} in {state.worse_evals} evaluations."))
