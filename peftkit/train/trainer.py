"""Optimizer steps, with recovery from running out of memory and from loss-scale overflow."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.base.sharding import is_sharded
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
from peftkit.execution.signals import StopRequest
from peftkit.execution.state import State, StepFacts
from peftkit.execution.strategies import smaller
from peftkit.execution.world import World
from peftkit.model.blocks import STREAMED
from peftkit.model.modes import refresh_layouts
from peftkit.settings import TrainConfig
from peftkit.tasks.batches import split_micro_batches, too_large
from peftkit.tasks.lockstep import GlobalBatchValues, LockstepForward, Part
from peftkit.tasks.base import Task
from peftkit.train.batches import BatchPrefetcher, on_device
from peftkit.train.diagnosis import Diagnosis, NonFiniteError, diagnose, sources
from peftkit.train.memory.blocks import Blocks
from peftkit.train.optim import LossScale, build_optimizer, complete_gradients, set_learning_rate

OUT_OF_MEMORY = "memory ran out"

Batch = tuple[Mapping[str, Tensor], bool]
"""And whether it is this process's own, or run for the others."""


class Trainer:
    """Computes gradients, checks them, and lets the optimizer step.

    Args:
        parameters: What is trained, by name.
        in_step: By default processes run the model each as often as it has to.

    Attributes:
        asked: The plan as the recipe has it; `state.plan` is what fits into memory.
        modes: What may be kept of activations, the fastest first.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        parameters: Mapping[str, nn.Parameter],
        config: TrainConfig,
        ranks: World,
        stop: StopRequest,
        in_step: LockstepForward | None = None,
        plan: ExecutionPlan | None = None,
    ) -> None:
        self.model, self.task, self.parameters = model, task, parameters
        self.in_step = in_step or LockstepForward(ranks, task.bucket_key, needed=False)
        self.config, self.ranks, self.stop = config, ranks, stop
        plan = plan or _as_found(model, config, ranks)
        self.optimizer = build_optimizer(parameters, config)
        in_fp16 = plan.on_gpu and plan.dtype == "float16"
        self.scale = LossScale(needed=in_fp16 or ranks.precision == "fp16")
        self.feed = BatchPrefetcher(task, ranks.device)
        self.blocks = Blocks(model, plan)
        self.modes = self.blocks.ways(config.gradient_checkpointing)
        self.asked = replace(plan, activations=self.modes[0])
        self.state = State(self.asked)

    def load_state(self, state: State) -> None:
        """Go on from a saved state."""
        self.state = state
        self.scale.factor, self.scale.good_steps = state.loss_scale, state.good_steps
        # the config may force another mode than the saved one: no number depends on it
        saved = state.plan
        state.plan = replace(
            self.asked, rows=saved.rows, tokens=saved.tokens, compile=saved.compile
        )
        known = saved.activations in self.modes
        self.set_activations(saved.activations if known else self.modes[0])

    @property
    def plan(self) -> ExecutionPlan:
        """How rows go through the model now."""
        return self.state.plan

    def use(self, plan: ExecutionPlan) -> None:
        """Follow another plan from now on."""
        if plan.activations != self.plan.activations:
            self.blocks.set_activations(plan.activations)
        self.state.plan = plan

    def set_activations(self, activations: Activations) -> None:
        """Set what is kept of the activations from now on."""
        self.blocks.set_activations(activations)
        self.state.plan = replace(self.plan, activations=activations)

    def stop_compiling(self) -> None:
        """Run blocks uncompiled from now on."""
        self.blocks.compile(False)
        self.state.plan = replace(self.plan, compile=False)

    def step(
        self, rows: Sequence[Any], rate: float, coming: Sequence[Any] | None = None
    ) -> StepFacts:
        """Learn from this process's rows of a step, possibly none.

        Args:
            coming: The rows of the step after this one: they may be collated meanwhile.

        Raises:
            NonFinite: The loss or a gradient is not finite.
            DataError: No process has anything to learn.
            RunError: Not even one row fits into memory.
        """
        start, before, said = rng.capture(self.ranks.device), self.plan, ""
        while True:
            known = self._looked_at(rows, start)
            batches = self._collated(rows, known)
            if coming is not None and self.feed.is_ahead:
                self.feed.prefetch(self.micro_batches(coming))
            targets = float(sum(self.task.num_targets(batch) for batch, own in batches if own))
            # counted over the whole group and all processes before the first backward pass, so that
            # the gradient is that of one mean over targets, not of a mean of means
            total = self.ranks.sum(torch.full((), targets, device=self.ranks.device))
            sums = self._try(batches, total.clamp(min=1), known)
            if isinstance(sums, str):
                refresh_layouts(self.model)  # which may hold the graph of the attempt
                release_memory()
                rng.restore(start, self.ranks.device)
            if isinstance(sums, str) and sums != OUT_OF_MEMORY:
                self.stop_compiling()
                said = f"Blocks run as they are written from here on, which takes longer. {sums} "
                sums = self._try(batches, total.clamp(min=1), known)
            done = None if isinstance(sums, str) else sums
            facts = self.finish(done, total, rows, rate, start=start)
            if facts is not None:
                break
            release_memory()
            rng.restore(start, self.ranks.device)
        if less := self.plan.less_than(before):
            said += f"Memory ran out. From here on: {less}. Each step learns from the same rows."
        return replace(facts, notice=said.strip())

    def finish(
        self,
        sums: Tensor | None,
        total: Tensor,
        rows: Sequence[Any],
        rate: float,
        *,
        start: rng.State | None = None,
    ) -> StepFacts | None:
        """Let the optimizer step with gradients that are in place.

        Args:
            sums: As `Task.loss_and_metric_sums`, of all rows; None: memory ran out here.
            total: Their targets, on all processes.
            start: The generators before the step, to diagnose it; by default as they are now.

        Returns:
            None where the step is to be tried again: memory ran out on some process, and all have
            taken the next step of the ladder; or the gradients overflowed the loss scale, which is
            lower then.

        Raises:
            NonFinite: The loss or a gradient is not finite.
        """
        ran_out = sums is None
        if sums is None:
            self.optimizer.zero_grad(set_to_none=True)
            sums = torch.zeros(1 + self.task.num_metrics, device=self.ranks.device)
        found = self._summed(sums, total, rows, ran_out)
        if found is None:
            self._use_less_memory(rows, ran_out)
            return None
        facts, grad_norm = found
        if not (math.isfinite(facts.loss) and math.isfinite(facts.grad_norm)):
            if math.isfinite(facts.loss) and self.scale.overflowed():
                return None
            start = rng.capture(self.ranks.device) if start is None else start
            raise NonFiniteError(self._diagnosis(rows, start, facts))
        self._update(grad_norm, rate)
        return facts

    def _looked_at(self, rows: Sequence[Any], start: rng.State) -> GlobalBatchValues | None:
        """Look at the rows of a step first, where their losses depend on each other."""
        if not self.task.needs_whole_step:
            return None
        while True:
            parts = self.micro_batches(rows)
            if len(parts) <= 1 and self.ranks.world_size == 1:
                return None  # the one batch is all there is
            with torch.no_grad(), self.blocks.eagerly():
                passes = self.in_step.padded_passes(parts)
                found = self.in_step.step_values(self.row_values, rows, passes)
            if found is not None:
                return found
            release_memory()
            rng.restore(start, self.ranks.device)
            self._use_less_memory(rows, True)

    def row_values(self, rows: Sequence[Any]) -> Tensor:
        """Return what other rows' losses need to know of rows that go through at once."""
        (batch,) = self.feed.batches([rows])
        with self.ranks.autocast():
            return self.task.row_values(self.model, self.feed.to_device(batch))

    def _try(
        self,
        batches: Iterable[Batch],
        total: Tensor,
        known: GlobalBatchValues | None = None,
    ) -> Tensor | str:
        """Run forward and backward passes; returns OUT_OF_MEMORY, or why compiling failed."""
        self.optimizer.zero_grad(set_to_none=True)
        summed = torch.zeros(1 + self.task.num_metrics, device=self.ranks.device)
        try:
            for batch, is_real in batches:
                if known is not None and is_real:
                    known.restore(batch, self.ranks.device)
                sums = self.sums(batch)
                (sums[0] * (self.scale.factor / total if is_real else 0.0)).backward()
                if is_real:
                    summed += sums.detach()  # stays on the device: .item() would wait for it
        except Exception as error:
            if self.blocks.compiled and is_compile_error(error):
                return one_line(error)
            if self.in_step.ran_out(error):
                return OUT_OF_MEMORY  # not the error: its traceback holds the activations
            raise
        return summed

    def loss(self, rows: Sequence[Any]) -> Tensor:
        """Return the summed loss of rows that go through the model at once."""
        (batch,) = self.feed.batches([rows])
        return self.sums(batch)[0]

    def sums(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return `Task.loss_and_metric_sums` of a batch."""
        with self.ranks.autocast():
            return self.task.loss_and_metric_sums(self.model, self.feed.to_device(batch))

    def _collated(self, rows: Sequence[Any], known: GlobalBatchValues | None) -> list[Batch]:
        passes = self.in_step.padded_passes(self.micro_batches(rows))
        own = [part for part, is_real in passes if is_real]
        idle = [part for part, is_real in passes if not is_real]
        made = iter(self.feed.batches(own))
        others = iter(self.feed.batches(idle) if idle else [])
        batches = [(next(made if is_real else others), is_real) for _, is_real in passes]
        if known is None:
            return batches
        pairs = zip(batches, passes, strict=True)
        return [(known.given_to(batch, part), is_real) for (batch, is_real), (part, _) in pairs]

    def micro_batches(self, rows: Sequence[Any]) -> list[Part]:
        """Return rows in parts that go through the model at once."""
        return self.cut(rows, self.plan.rows, self.plan.tokens)

    def cut(self, rows: Sequence[Any], most: int, tokens: int | None) -> list[Part]:
        """Return rows in parts of at most so many, and of so many tokens."""
        task = self.task
        parts = split_micro_batches(rows, task.num_positions, most, tokens, task.bucket_key)
        return self.in_step.ordered(parts)

    def _use_less_memory(self, rows: Sequence[Any], ran_out: bool) -> None:
        """Take the next step of what takes less memory; all processes come here and take the same.

        Args:
            ran_out: Whether memory ran out on this one.

        Raises:
            RunError: Not even one row fits.
        """
        parts = self.micro_batches(rows)
        own = [
            max(map(len, parts), default=0),
            max(map(self.task.num_positions, parts), default=0),
            int(any(map(num_tokens, rows))),
        ]
        most = self.ranks.gather(torch.tensor(own, device=self.ranks.device)).amax(0).tolist()
        found = smaller(
            self.plan,
            self.asked,
            self.modes,
            rows=most[0],
            tokens=most[1],
            counts_tokens=bool(most[2]),
        )
        if found is not None:
            self.use(found)
            return
        if not ran_out:
            raise RunError("one row alone does not fit into the memory of another process")
        one = torch.ones((), device=self.ranks.device)
        longest = max(rows, key=lambda row: self.task.num_positions([row]))

        def fits(row: Any) -> bool:
            (batch,) = self.feed.batches([[row]])
            return self._try([(batch, True)], one) is not OUT_OF_MEMORY

        raise too_large(longest, rows, fits)

    def _summed(
        self, sums: Tensor, total: Tensor, rows: Sequence[Any], ran_out: bool
    ) -> tuple[StepFacts, Tensor] | None:
        """Sum gradients and figures over all processes; the only wait for the device in a step.

        None: memory ran out on one of them.
        """
        gradients = complete_gradients(self.parameters)
        self.ranks.sum_gradients(gradients)
        if self.scale.factor != 1.0:
            torch._foreach_mul_(gradients, 1 / self.scale.factor)
        grad_norm = torch.nn.utils.get_total_norm(gradients)
        stop = self.stop.signum
        own = [
            sum(map(num_tokens, rows)) / self.ranks.cp_size,
            stop == signal.SIGINT,
            stop == signal.SIGTERM,
            not ran_out,
        ]
        counts = on_device(own, sums.device)
        counts = self.ranks.sum(torch.cat([counts, sums.float()]))
        both = torch.cat([total[None], grad_norm.float()[None], counts])
        targets, norm, tokens, interrupts, terminations, fitting, *summed = both.tolist()
        if fitting < self.ranks.world_size:
            return None
        if targets == 0:
            raise DataError(
                "a step has nothing to learn: all its labels are masked",
                found=f"Rows: {', '.join(sources(rows)[:8])}",
                fix="Drop such rows; peftkit check RECIPE shows what the loss sees.",
            )
        asked = signal.SIGINT if interrupts else signal.SIGTERM if terminations else 0
        loss, *means = (figure / targets for figure in summed)
        told = self.task.metric_means(means)
        return StepFacts(loss, told, norm, round(tokens), int(asked), ""), grad_norm

    def _update(self, grad_norm: Tensor, rate: float) -> None:
        if self.config.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters.values(), self.config.max_grad_norm, grad_norm
            )
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
        self.scale.went_well()
        self.optimizer.zero_grad(set_to_none=True)

    def _diagnosis(self, rows: Sequence[Any], start: rng.State, facts: StepFacts) -> Diagnosis:
        rng.restore(start, self.ranks.device)
        with self.blocks.eagerly():  # compiled blocks do not show what is inside of them
            return diagnose(
                self.model,
                self.loss,
                self.in_step.padded_passes(self.micro_batches(rows)),
                step=self.state.step + 1,
                loss=facts.loss,
                grad_norm=facts.grad_norm,
                to_the_end=self.in_step.needed,
            )


def _as_found(model: Any, config: TrainConfig, ranks: World) -> ExecutionPlan:
    """Return how a model that is there goes through its rows, before anything is measured."""
    first = next(model.parameters())
    return config.plan(
        ranks.device.type,
        ranks.world_size,
        placement="stream" if hasattr(model, STREAMED) else "device",
        shard="base" if is_sharded(model) else "none",
        dtype=str(getattr(model, "dtype", first.dtype)).removeprefix("torch."),
        autocast=ranks.precision or "",
    )
