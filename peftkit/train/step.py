"""Optimizer steps, with recovery from running out of memory and from loss-scale overflow."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.pack import num_tokens
from peftkit.errors import DataError, RunError
from peftkit.execution import rng
from peftkit.execution.out_of_memory import (
    is_compile_error,
    is_out_of_memory,
    one_line,
    release_memory,
)
from peftkit.execution.plan import Activations, ExecutionPlan
from peftkit.execution.state import State, StepFacts
from peftkit.execution.strategies import smaller
from peftkit.methods.lora_linear import refresh_groups
from peftkit.tasks.base import Run
from peftkit.tasks.batches import OnDevice, too_large
from peftkit.train.batches import BatchPrefetcher, on_device
from peftkit.train.diagnosis import Diagnosis, NonFiniteError, diagnose, sources
from peftkit.train.memory.blocks import Blocks
from peftkit.train.optim import LossScale, build_optimizer, complete_gradients, set_learning_rate

Batch = tuple[Mapping[str, Tensor], bool]
"""A batch, and whether it is this process's own; others keep the processes in lockstep."""


class Trainer:
    """Computes gradients, checks them, and lets the optimizer step.

    Args:
        run: Its `state.plan` is the plan as the recipe has it.
        parameters: What is trained, by name.

    Attributes:
        requested: The plan as the recipe has it; `run.state.plan` is what fits into memory.
        modes: What may be kept of activations, the fastest first.
    """

    def __init__(self, run: Run, parameters: Mapping[str, nn.Parameter]) -> None:
        self.run, self.parameters = run, parameters
        self.model, self.task, self.world = run.model, run.task, run.world
        config, plan = run.config, run.state.plan
        self.optimizer = build_optimizer(parameters, config)
        in_fp16 = plan.on_gpu and plan.dtype == "float16"
        self.scale = LossScale(needed=in_fp16 or self.world.precision == "fp16")
        self.prefetcher = BatchPrefetcher(run.task, self.world.device)
        self.blocks = Blocks(run.model, plan)
        self.modes = self.blocks.ways(config.gradient_checkpointing)
        self.requested = replace(plan, activations=self.modes[0])
        run.state.plan = self.requested

    def load_state(self, state: State) -> None:
        """Go on from a saved state."""
        self.run.state = state
        self.scale.factor, self.scale.good_steps = state.loss_scale, state.good_steps
        # the config may force another mode than the saved one: no number depends on it
        saved = state.plan
        state.plan = replace(
            self.requested, rows=saved.rows, tokens=saved.tokens, compile=saved.compile
        )
        is_allowed = saved.activations in self.modes
        self.set_activations(saved.activations if is_allowed else self.modes[0])

    @property
    def plan(self) -> ExecutionPlan:
        """How rows go through the model now."""
        return self.run.state.plan

    def use(self, plan: ExecutionPlan) -> None:
        """Follow another plan from now on."""
        if plan.activations != self.plan.activations:
            self.blocks.set_activations(plan.activations)
        self.run.state.plan = plan

    def set_activations(self, activations: Activations) -> None:
        """Set what is kept of the activations from now on."""
        self.blocks.set_activations(activations)
        self.run.state.plan = replace(self.plan, activations=activations)

    def stop_compiling(self) -> None:
        """Run blocks uncompiled from now on."""
        self.blocks.compile(False)
        self.run.state.plan = replace(self.plan, compile=False)

    def step(
        self, rows: Sequence[Any], rate: float, coming: Sequence[Any] | None = None
    ) -> StepFacts:
        """Learn from this process's rows of a step, possibly none.

        Args:
            coming: The rows of the step after this one: they may be collated meanwhile.

        Raises:
            NonFiniteError: The loss or a gradient is not finite.
            DataError: No process has anything to learn.
            RunError: Not even one row fits into memory.
        """
        start, before = rng.capture(self.world.device), self.plan
        while True:
            batches = self._collated(rows)
            if coming is not None and self.prefetcher.is_ahead:
                self.prefetcher.prefetch(self.run.micro_batches(coming))
            targets = sum(self.task.num_targets(batch) for batch, is_own in batches if is_own)
            # counted over the whole group and all processes before the first backward pass, so that
            # the gradient is that of one mean over targets, not of a mean of means
            total = self.world.sum(torch.full((), float(targets), device=self.world.device))
            sums = self._gradients(batches, total.clamp(min=1), start)
            summed = self._summed(sums, total, rows)
            if summed is None:
                self._use_less_memory(rows, sums is None, start)
            else:
                facts, grad_norm = summed
                if math.isfinite(facts.loss) and math.isfinite(facts.grad_norm):
                    break
                if not (math.isfinite(facts.loss) and self.scale.overflowed()):
                    raise NonFiniteError(self._diagnosis(rows, start, facts))
            release_memory()
            rng.restore(start, self.world.device)
        self._update(grad_norm, rate)
        return replace(facts, notice=self._changed_since(before))

    def _changed_since(self, before: ExecutionPlan) -> str:
        """Return what the user should know of the plan that a step ended with."""
        notice = ""
        if before.compile and not self.plan.compile:
            notice = "Blocks run as they are written from here on, which takes longer. "
            notice += f"{self._compile_problem} "
        if less := self.plan.less_than(before):
            notice += f"Memory ran out. From here on: {less}. Each step learns from the same rows."
        return notice.strip()

    def _gradients(
        self, batches: Sequence[Batch], total: Tensor, start: rng.State
    ) -> Tensor | None:
        """Run forward and backward passes; return the sums of `Task.loss`, None if memory ran out.

        Blocks that fail to compile run uncompiled from then on.
        """
        try:
            return self._accumulate(batches, total)
        except Exception as error:
            problem = ""
            if self.blocks.compiled and is_compile_error(error):
                problem = one_line(error)
            elif not self.run.parallel.ran_out(error):
                raise
        # outside of the `except` block, whose traceback holds the activations
        refresh_groups(self.model)  # which may hold the graph of the attempt
        release_memory()
        rng.restore(start, self.world.device)
        if not problem:
            return None
        self._compile_problem = problem
        self.stop_compiling()
        return self._gradients(batches, total, start)

    def _accumulate(self, batches: Sequence[Batch], total: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        summed = self._no_sums()
        for batch, is_own in batches:
            sums = self.sums(batch)
            (sums[0] * (self.scale.factor / total if is_own else 0.0)).backward()
            if is_own:
                summed += sums.detach()  # stays on the device: .item() would wait for it
        return summed

    def _no_sums(self) -> Tensor:
        return torch.zeros(1 + len(self.task.metric_names), device=self.world.device)

    def loss(self, rows: Sequence[Any]) -> Tensor:
        """Return the summed loss of rows that go through the model at once."""
        (batch,) = self.prefetcher.batches([rows])
        return self.sums(batch)[0]

    def sums(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return `Task.loss` of a batch."""
        with self.world.autocast():
            return self.task.loss(self.model, OnDevice(batch, self.world.device))

    def _collated(self, rows: Sequence[Any]) -> list[Batch]:
        passes = self.run.parallel.align(self.run.micro_batches(rows))
        own = [part for part, is_own in passes if is_own]
        idle = [part for part, is_own in passes if not is_own]
        batches = iter(self.prefetcher.batches(own))
        padding = iter(self.prefetcher.batches(idle) if idle else [])
        return [(next(batches if is_own else padding), is_own) for _, is_own in passes]

    def _use_less_memory(self, rows: Sequence[Any], ran_out: bool, start: rng.State) -> None:
        """Take the next step that takes less memory; all processes come here and take the same.

        Args:
            ran_out: Whether memory ran out on this one.

        Raises:
            RunError: Not even one row fits.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.run.micro_batches(rows)
        largest = [
            max(map(len, parts), default=0),
            max(map(self.task.num_positions, parts), default=0),
            int(any(map(num_tokens, rows))),
        ]
        most = self.world.gather(torch.tensor(largest, device=self.world.device)).amax(0).tolist()
        plan = smaller(
            self.plan,
            self.requested,
            self.modes,
            rows=most[0],
            tokens=most[1],
            counts_tokens=bool(most[2]),
        )
        if plan is not None:
            self.use(plan)
            return
        if not ran_out:
            raise RunError("one row alone does not fit into the memory of another process")
        one = torch.ones((), device=self.world.device)
        longest = max(rows, key=lambda row: self.task.num_positions([row]))

        def fits(row: Any) -> bool:
            (batch,) = self.prefetcher.batches([[row]])
            return self._gradients([(batch, True)], one, start) is not None

        raise too_large(longest, rows, fits)

    def _summed(
        self, sums: Tensor | None, total: Tensor, rows: Sequence[Any]
    ) -> tuple[StepFacts, Tensor] | None:
        """Sum gradients and figures over all processes; the only wait for the device in a step.

        Args:
            sums: Of `Task.loss`; None: memory ran out here.
            total: Targets, on all processes.

        Returns:
            None: memory ran out on one of the processes.
        """
        if sums is None:
            self.optimizer.zero_grad(set_to_none=True)
        gradients = complete_gradients(self.parameters)
        self.world.sum_gradients(gradients)
        if self.scale.factor != 1.0:
            torch._foreach_mul_(gradients, 1 / self.scale.factor)
        grad_norm = torch.nn.utils.get_total_norm(gradients)
        stop, parallel = self.run.stop.signum, self.run.parallel
        counts = [
            sum(map(num_tokens, rows)) * parallel.size / self.world.world_size,
            stop == signal.SIGINT,
            stop == signal.SIGTERM,
            sums is not None,
        ]
        of_loss = (self._no_sums() if sums is None else sums).float()
        over_all = self.world.sum(torch.cat([on_device(counts, self.world.device), of_loss]))
        both = torch.cat([total[None], grad_norm.float()[None], over_all])
        targets, norm, tokens, interrupts, terminations, fitting, *summed = both.tolist()
        if fitting < self.world.world_size:
            return None
        if targets == 0:
            raise DataError(
                "a step has nothing to learn: all its labels are masked",
                found=f"Rows: {', '.join(sources(rows)[:8])}",
                fix="Drop such rows; peftkit check RECIPE shows what the loss sees.",
            )
        signum = signal.SIGINT if interrupts else signal.SIGTERM if terminations else 0
        loss, *means = (figure / targets for figure in summed)
        figures = self.task.metric_means(means)
        return StepFacts(loss, figures, norm, round(tokens), int(signum), ""), grad_norm

    def _update(self, grad_norm: Tensor, rate: float) -> None:
        max_grad_norm = self.run.config.max_grad_norm
        if max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_grad_norm, grad_norm)
        set_learning_rate(self.optimizer, rate)
        try:
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                "memory ran out when the optimizer made its state",
                found=f"{sum(p.numel() for p in self.parameters.values()):,} trained values.",
                fix="Use train.optimizer: adamw_8bit or paged_adamw_8bit, or a lower rank.",
            ) from None
        refresh_groups(self.model)
        self.scale.went_well()
        self.optimizer.zero_grad(set_to_none=True)

    def _diagnosis(self, rows: Sequence[Any], start: rng.State, facts: StepFacts) -> Diagnosis:
        rng.restore(start, self.world.device)
        parallel = self.run.parallel
        with self.blocks.eagerly():  # compiled blocks do not show what is inside of them
            return diagnose(
                self.model,
                self.loss,
                parallel.align(self.run.micro_batches(rows)),
                step=self.run.state.step + 1,
                loss=facts.loss,
                grad_norm=facts.grad_norm,
                to_the_end=parallel.in_lockstep,
            )
