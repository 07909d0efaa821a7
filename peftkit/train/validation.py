"""Evaluations and samples while a run goes on: the best step, and whether it still improves."""

from __future__ import annotations

import math
from collections.abc import Callable

from peftkit.events import EvalDone, Event, Notice, Sampled
from peftkit.train.evaluate import Evaluator
from peftkit.train.rollouts import Rollouts
from peftkit.train.sharding import gathered, is_sharded
from peftkit.train.task import GenerationEvaluator
from peftkit.train.trainer import Trainer


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
        return enough or state.step >= self.num_steps

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
