"""Steps that learn from the model's own answers to the prompts of the step.

Which prompts, seeds and answers a step has is a function of the run's seed, the step and the
weights: nothing of them is saved, and a resumed run makes them again. Checkpoints lie between
steps, never between two updates with the same answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from peftkit.errors import ConfigError, RunError
from peftkit.events import Listener, Notice, RolledOut
from peftkit.execution import rng
from peftkit.execution.state import StepFacts
from peftkit.model.modes import evaluating
from peftkit.tasks.training import Rollout, RolloutTask, Sampler
from peftkit.train.trainer import Trainer

MAX_EMPTY = 20
"""Steps in a row that teach nothing before the run ends."""


class Rollouts:
    """Makes the rows of steps, and has the trainer learn from them.

    Args:
        seed: The run's. say: Hears the answers.
    """

    def __init__(self, learner: Trainer, sampler: Sampler | None, seed: int, say: Listener) -> None:
        if sampler is None or learner.in_step.needed:
            raise ConfigError(
                "learning from the model's own answers needs the whole base on each process",
                fix="Use peftkit train, with train.shard: none and train.context_parallel: 1.",
            )
        self.learner, self.sampler, self.seed, self.say = learner, sampler, seed, say
        self.task = cast(RolloutTask, learner.task)

    def step(self, prompts: Sequence[Any], indices: Sequence[int], rate: float) -> StepFacts:
        """Have the model answer this process's prompts, and learn from the answers.

        Args:
            indices: Of the prompts among the run's rows.

        Raises:
            RunError: A reward function failed, or nothing is left to learn.
        """
        learner, state = self.learner, self.learner.state
        began = time.perf_counter()
        seeds = [rng.seed_of(self.seed, state.step, index) for index in indices]
        made = self._rolled_out(prompts, seeds)
        seconds = time.perf_counter() - began
        self.say(RolledOut(state.step + 1, seconds, made.answers))
        told = self._means(made) | {"rollout_seconds": seconds}
        if not learner.ranks.max(len(made.rows)):
            return self._taught_nothing(told)
        state.empty_steps = 0
        began = time.perf_counter()
        if self.task.needs_log_probs:
            self._look(made.rows)
        for _ in range(self.task.updates):
            facts = learner.step(made.rows, rate)
        told["learn_seconds"] = time.perf_counter() - began
        figures = {**told, **facts.figures}
        least = self.task.stop_entropy
        if least is not None and figures["entropy"] < least:
            state.is_sure = True
            sure = f"The model is sure: its entropy fell to {figures['entropy']:.4g}"
            self.say(Notice(f"{sure}, below task.stop_entropy: {least:g}. The run ends here."))
        return replace(facts, figures=figures)

    def evaluate(self, prompts: Sequence[Any]) -> dict[str, float]:
        """Return the mean rewards of greedy answers, and as "loss" minus their reward."""
        means = self._means(self._rolled_out(prompts, None))
        return {"loss": -means["reward"], **means}

    def _rolled_out(self, prompts: Sequence[Any], seeds: Sequence[int] | None) -> Rollout:
        """Have prompts answered; the generators are left as they were."""
        before = rng.capture(self.learner.ranks.device)
        with self.learner.blocks.eagerly(), evaluating(self.learner.model):
            made = self.task.roll_out(prompts, seeds, self.sampler)
        rng.restore(before, self.learner.ranks.device)
        return made

    def _taught_nothing(self, told: Mapping[str, float]) -> StepFacts:
        """Count a step whose groups are all equal; the weights stay as they are."""
        learner, state = self.learner, self.learner.state
        state.empty_steps += 1
        if state.empty_steps >= MAX_EMPTY:
            raise RunError(
                f"{MAX_EMPTY} steps in a row taught nothing: all answers to a prompt that are "
                "learnt from are worth the same",
                found=f"Their mean reward is {told['reward']:.4g}; {told['cut']:.0%} were cut at "
                "task.max_new_tokens.",
                fix="Give a reward that tells answers apart, easier prompts, more answers each, or "
                "longer ones.",
            )
        stop = learner.ranks.max(learner.stop.signum)
        return StepFacts(0.0, told, 0.0, num_tokens=0, stop=stop, notice="")

    def _means(self, made: Rollout) -> dict[str, float]:
        """Return the means over the answers of all processes."""
        number = len(made.answers)
        own = torch.tensor([number, *(value * number for value in made.metrics.values())])
        total, *sums = self.learner.ranks.sum(own.to(self.learner.ranks.device)).tolist()
        return {name: value / total for name, value in zip(made.metrics, sums, strict=True)}

    @torch.no_grad()
    def _look(self, rows: Sequence[Any]) -> None:
        """Find log-probabilities of these weights, or the reference's, where a step needs them."""
        learner = self.learner
        with learner.blocks.eagerly(), evaluating(learner.model), learner.ranks.autocast():
            for part in learner.micro_batches(rows):
                (batch,) = learner.feed.batches([part])
                found = self.task.log_probs(learner.model, learner.feed.to_device(batch))
                self.task.remember(part, found)
