"""Optimizer steps that recover from running out of memory and from overflowing gradients."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peftkit.adapter import refresh_copies
from peftkit.data.rows.lazy import num_tokens
from peftkit.errors import ConfigError, DataError, RunError
from peftkit.execution import rng
from peftkit.execution.out_of_memory import (
    RetryWatch,
    attempt,
    is_compile_error,
    is_out_of_memory,
    one_line,
    release_memory,
)
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.state import State, StepFacts
from peftkit.execution.world import Rows
from peftkit.forward.blocks import Blocks
from peftkit.kernels.device import busy_tokens, product_rate
from peftkit.quant.audit import audit
from peftkit.quant.layers import keep_copies
from peftkit.tasks.batches import OnDevice, RowTooLarge, too_large
from peftkit.tasks.run_hooks import Run
from peftkit.train.batches import BatchPrefetcher, on_device
from peftkit.train.diagnosis import Diagnosis, NonFiniteError, diagnose, sources
from peftkit.train.fitting import Fitting
from peftkit.train.optim import (
    GradientWatch,
    build_optimizer,
    complete_gradients,
    set_learning_rate,
)

if TYPE_CHECKING:
    from peftkit.forward.recorded import RecordedPasses

Batch = tuple[Mapping[str, Tensor], bool]
"""A batch, and whether it counts; padding batches keep processes in lockstep."""


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name.

    Raises:
        ConfigError: There are none, or they are in fp16, or on several devices.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError(
            f"there is nothing to train in {type(model).__name__}",
            found="None of its parameters requires a gradient.",
            fix="Attach an adapter first: attach(model, LoRA(...)).",
        )
    half = [name for name, p in parameters.items() if p.dtype == torch.float16]
    if half:
        raise ConfigError(
            "adapters cannot be trained in fp16",
            found=f"{half[0]} and {len(half) - 1} more are in fp16.",
            fix="Use method.dtype: fp32 (or bf16); the base may be fp16.",
        )
    devices = sorted({str(p.device) for p in parameters.values()})
    if len(devices) > 1:
        raise ConfigError("the adapter is on more than one device", found=", ".join(devices))
    return parameters


class Step:
    """An optimizer step of a run: computes gradients, checks them, and updates the parameters.

    Attributes:
        parameters: The model's trainable parameters, by name.
        fitting: The fallback order; `run.state.plan` is the current plan.
        passes: Runs passes of micro-batches while the plan records them; None: `run_pass` does.
        retries: Watches the allocator of a GPU that is nearly full.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.parameters = run, trainable_parameters(run.model)
        self.model, self.task, self.world = run.model, run.task, run.world
        config, plan, device = run.config, run.state.plan, self.world.device
        self.optimizer = build_optimizer(self.parameters, config)
        self._watch, self.retries = GradientWatch(self.parameters, device), RetryWatch(device)
        self.prefetcher = BatchPrefetcher(run.task, device)
        self.blocks = Blocks(run.model, plan)
        busy = busy_tokens(
            product_rate(device), audit(run.model).num_parameters, len(self.blocks.blocks)
        )
        plan = replace(plan, busy_tokens=self.world.max(busy))
        in_fp16 = plan.on_gpu and plan.dtype == "float16"
        self.fitting = Fitting(
            plan,
            self.blocks.activation_modes(config.gradient_checkpointing),
            run.task.num_positions,
            needs_scale=in_fp16 or self.world.precision == "fp16",
        )
        run.state.plan = self.fitting.requested
        self._compile_problem = ""
        self.passes: RecordedPasses | None = None

    def load_state(self, state: State, *, is_exact: bool) -> None:
        """Continue from a saved state.

        Args:
            is_exact: Whether the settings are unchanged, so the saved plan applies.
        """
        saved, plan, scale = state.plan, self.fitting.requested, self.fitting.scale
        if is_exact:
            plan = replace(plan, rows=saved.rows, tokens=saved.tokens, compile=saved.compile)
            plan = replace(plan, record=plan.record and saved.record)
        if is_exact and saved.activations in self.fitting.modes:  # numbers do not depend on them
            plan = replace(plan, activations=saved.activations, tiles=saved.tiles)
            plan = replace(plan, num_recomputed=saved.num_recomputed)
        state.measured = state.measured and is_exact
        scale.factor, scale.good_steps = state.loss_scale, state.good_steps
        self.run.state = state
        self.use(plan)

    @property
    def plan(self) -> ExecutionPlan:
        """The current plan."""
        return self.run.state.plan

    def use(self, plan: ExecutionPlan) -> None:
        """Switch to a plan; only `compile_blocks` compiles blocks."""
        if self.passes is not None and plan != self.run.state.plan:
            self.passes.follow(records=plan.records_passes)
        if self.plan.keeps_copies and not plan.keeps_copies:
            keep_copies(self.model, 0)
        self.run.state.plan = plan
        blocks, count = self.blocks, plan.num_recomputed
        before = blocks.activations, blocks.tiles, blocks.num_recomputed
        if (plan.activations, plan.tiles, count) != before:
            blocks.set_activations(plan.activations, tiles=plan.tiles, num_recomputed=count)
        if self.blocks.compiled and not plan.compile:
            self.blocks.compile(False)

    def eagerly(self) -> AbstractContextManager[object]:
        """Return a context in which blocks run eagerly, compiled or not."""
        return self.blocks.eagerly()

    def close(self) -> None:
        """End the thread that collates, and undo the changes to the model's blocks."""
        self.prefetcher.close()
        self.blocks.restore()
        if self.plan.keeps_copies:
            keep_copies(self.model, 0)

    def __call__(self, rows: Rows, rate: float, coming: Rows | None = None) -> StepFacts:
        """Train on this process's rows of a step, possibly none.

        Args:
            coming: The rows of the next step, to collate ahead.

        Raises:
            NonFiniteError: The loss or a gradient is not finite.
            DataError: No process has a target.
            RunError: A single row does not fit into memory.
        """
        device, before = self.world.device, self.plan
        start = rng.capture(device)
        ran_out = False  # on this process

        def compute() -> tuple[StepFacts, Tensor] | None:
            nonlocal ran_out
            passes = self.run.parallel.align(self.run.micro_batches(rows))
            real = iter(self.prefetcher.batches([part for part, is_real in passes if is_real]))
            batches = [
                (next(real) if is_real else self.prefetcher.batches([part])[0], is_real)
                for part, is_real in passes
            ]
            if coming is not None and self.prefetcher.is_ahead:  # with this attempt's plan
                self.prefetcher.prefetch(self.run.micro_batches(coming))
            targets = sum(self.task.num_targets(batch) for batch, is_real in batches if is_real)
            # Counted over all micro-batches and processes before the first backward pass: the
            # gradient is the gradient of one mean over targets, not of a mean of means.
            total = self.world.sum(torch.full((), float(targets), device=device))
            sums = self._gradients(batches, total.clamp(min=1), start)
            ran_out = sums is None
            return self._reduce(sums, total, rows)

        def undo() -> None:
            release_memory()
            rng.restore(start, device)

        facts, norms = self.fitting.retry(
            compute,
            overflows=lambda result: (
                math.isfinite(result[0].loss) and not math.isfinite(result[0].grad_norm)
            ),
            step_down=lambda: self._use_less_memory(rows, ran_out, start),
            undo=undo,
        )
        if not (math.isfinite(facts.loss) and math.isfinite(facts.grad_norm)):
            raise NonFiniteError(self._diagnosis(rows, start, facts))
        notice = self._watch.report()
        self._update(norms, rate)
        if before.compile and not self.plan.compile:
            notice += f" Blocks run eagerly from now on, which is slower. {self._compile_problem}"
        if self.plan is not before and (less := self.plan.less_than(before)):
            notice += f" Memory ran out. From now on: {less}. The rows of a step stay the same."
        return replace(facts, notice=notice.strip())

    def _gradients(
        self, batches: Sequence[Batch], total: Tensor, start: rng.State
    ) -> Tensor | None:
        """Run forward and backward passes; return the sums of `Task.loss`, None if memory ran out.

        If blocks fail to compile, they run eagerly from then on.
        """
        compile_problem = ""

        def failed(error: Exception) -> bool:
            nonlocal compile_problem
            if self.blocks.compiled and is_compile_error(error):
                compile_problem = one_line(error)
            return bool(compile_problem) or self.run.parallel.ran_out(error)

        sums = attempt(
            lambda: self._accumulate(batches, total),
            failed,
            undo=lambda: refresh_copies(self.model),  # copies may hold the attempt's graph
        )
        if sums is not None:
            return sums
        rng.restore(start, self.world.device)
        if not compile_problem:
            return None
        self._compile_problem = compile_problem
        self.use(replace(self.plan, compile=False))
        return self._gradients(batches, total, start)

    def _accumulate(self, batches: Sequence[Batch], total: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        run_pass: Callable[[Mapping[str, Tensor], Tensor], Tensor] = self.run_pass
        if self.passes is not None and self.plan.records_passes:
            self.passes.begin()
            run_pass = self.passes
        total_sums, scale = self._no_sums(), self.fitting.scale.factor / total
        for batch, is_real in batches:
            sums = run_pass(batch, scale if is_real else 0 * scale)
            if is_real:
                total_sums += sums  # .item() would synchronise with the host
        return total_sums

    def run_pass(self, batch: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Run a forward and a backward pass, possibly within a capture; return `Task.loss`."""
        sums = self._sums(batch)
        (sums[0] * scale).backward()
        return sums.detach()

    def _no_sums(self) -> Tensor:
        return torch.zeros(1 + len(self.task.metric_names), device=self.world.device)

    def loss(self, rows: Rows) -> Tensor:
        """Return the summed loss of rows in one batch."""
        return self.sums(rows)[0][0]

    def sums(self, rows: Rows) -> tuple[Tensor, int]:
        """Return `Task.loss` of rows in one batch, and their number of targets."""
        (batch,) = self.prefetcher.batches([rows])
        return self._sums(batch), self.task.num_targets(batch)

    def _sums(self, batch: Mapping[str, Tensor]) -> Tensor:
        with self.world.autocast():
            return self.task.loss(self.model, OnDevice(batch, self.world.device))

    def _use_less_memory(self, rows: Rows, ran_out: bool, start: rng.State) -> None:
        """Switch to the next plan in the fallback order, the same on all processes.

        Args:
            ran_out: Whether memory ran out on this process.

        Raises:
            RunError: A single row does not fit.
        """
        self.optimizer.zero_grad(set_to_none=True)
        has_graphs = self.passes is not None and self.passes.has_captured
        if self.world.max(int(has_graphs)):  # they keep the memory of a pass
            self.use(replace(self.plan, record=False))
            return
        parts, largest = self.run.micro_batches(rows), self.world.max
        plan = self.fitting.smaller(self.plan, parts, lambda sizes: [*map(largest, sizes)])
        if plan is not None:
            self.use(plan)
            return
        if not ran_out:
            rng.restore(start, self.world.device)
            raise RowTooLarge("a single row does not fit into the memory of another process")
        one = torch.ones((), device=self.world.device)
        longest = max(rows, key=lambda row: self.task.num_positions([row]))

        def fits(row: object) -> bool:
            (batch,) = self.prefetcher.batches([[row]])
            return self._gradients([(batch, True)], one, start) is not None

        error = too_large(longest, rows, fits)
        rng.restore(start, self.world.device)  # the loop saves the completed steps
        raise error

    def _reduce(
        self, sums: Tensor | None, total: Tensor, rows: Rows
    ) -> tuple[StepFacts, Tensor] | None:
        """Sum gradients and figures over all processes; the only synchronisation of a step.

        Args:
            sums: Sums of `Task.loss`; None: memory ran out on this process.
            total: Targets of all processes.

        Returns:
            The step's facts and its gradients' norms, (tensors,); None: memory ran out on some
            process.
        """
        if sums is None:
            self.optimizer.zero_grad(set_to_none=True)
        gradients = complete_gradients(self.parameters)
        self.world.sum_gradients(gradients)
        if (factor := self.fitting.scale.factor) != 1.0:
            torch._foreach_mul_(gradients, 1 / factor)
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        grad_norm = torch.linalg.vector_norm(norms)
        stop = self.run.stop.signum
        counts = [
            sum(map(num_tokens, rows)),
            stop == signal.SIGINT,
            stop == signal.SIGTERM,
            sums is not None,
        ]
        loss_sums = (self._no_sums() if sums is None else sums).float()
        over_all = self.world.sum(torch.cat([on_device(counts, self.world.device), loss_sums]))
        everything = torch.cat([total[None], grad_norm[None], self._watch.longest, over_all])
        targets, norm, zero_steps, tokens, *counts = everything.tolist()
        interrupts, terminations, fitting, *summed = counts
        if fitting < self.world.world_size:
            return None
        if targets == 0:
            raise DataError(
                "a step has no target tokens: all its labels are masked",
                found=f"Rows: {', '.join(sources(rows)[:8])}",
                fix="Remove such rows; peftkit check RECIPE prints the target tokens.",
            )
        self._watch.num_steps = zero_steps
        signum = signal.SIGINT if interrupts else signal.SIGTERM if terminations else 0
        loss, *means = (figure / targets for figure in summed)
        figures = self.task.metric_means(means)
        return StepFacts(loss, figures, norm, round(tokens), int(signum), ""), norms

    def _update(self, norms: Tensor, rate: float) -> None:
        self._watch.count(norms)
        max_grad_norm = self.run.config.max_grad_norm
        if max_grad_norm is not None:
            grad_norm = torch.linalg.vector_norm(norms)
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_grad_norm, grad_norm)
        set_learning_rate(self.optimizer, rate)
        try:
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                "memory ran out when the optimizer allocated its state",
                found=f"{sum(p.numel() for p in self.parameters.values()):,} trained values.",
                fix="Use train.optimizer: adamw_8bit or paged_adamw_8bit, or a lower rank.",
            ) from None
        refresh_copies(self.model)
        self.run.hooks.after_step()
        self.fitting.scale.went_well()
        self.optimizer.zero_grad(set_to_none=True)

    def _diagnosis(self, rows: Rows, start: rng.State, facts: StepFacts) -> Diagnosis:
        rng.restore(start, self.world.device)
        parallel = self.run.parallel
        with self.eagerly():  # compiled blocks hide their modules
            return diagnose(
                self.model,
                self.loss,
                parallel.align(self.run.micro_batches(rows)),
                step=self.run.state.step + 1,
                loss=facts.loss,
                grad_norm=facts.grad_norm,
                to_the_end=parallel.in_lockstep,
            )
