"""How tenants learn over one base: seated for one operation, and taken off after it.

An operation adds all of its gradient to a tenant's, or nothing: where memory runs out, it is done
again with fewer rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from peftkit.adapter import attach, group_modules, refresh_copies
from peftkit.base.load import Base
from peftkit.execution.environment import free_now
from peftkit.execution.out_of_memory import is_out_of_memory, release_memory
from peftkit.execution.plan import (
    CPU_TOKENS,
    GPU_TOKENS,
    Activations,
    ExecutionPlan,
    activation_modes,
    choose,
    plan_of,
    smaller,
)
from peftkit.forward.blocks import Blocks
from peftkit.forward.fused import fused_modules
from peftkit.forward.loss import Head, find_head
from peftkit.inference.engine import context_length
from peftkit.methods.lora import LoRA
from peftkit.model.lift import lifted
from peftkit.model.modes import evaluating, modes_kept
from peftkit.serve.requests import RequestError
from peftkit.serve.tinker.losses import LOSSES, Loss, Settings
from peftkit.serve.tinker.rows import Datum, DatumTask
from peftkit.serve.tinker.tenant import Tenant
from peftkit.tasks.batches import split_micro_batches
from peftkit.train.memory import AUTO_SHARE, saved_by
from peftkit.train.optim import LossScale

ROWS = 1024
"""Rows at once, at most."""
PROBE = 64
"""Tokens of the row whose activations are counted."""

Found = list[dict[str, Tensor]]
"""Of each datum: `logprobs` and `elementwise_loss`."""


class DoesNotFit(RequestError):
    """A row does not fit into the memory that is left to it."""


class Learner:
    """A base over which tenants learn in turn; all calls come from the thread that has it."""

    def __init__(self, base: Base) -> None:
        self.base, self.model = base, base.model
        plan, blocks = plan_of(base.model), Blocks(base.model)
        tokens = GPU_TOKENS if plan.on_gpu else CPU_TOKENS
        has_blocks, streamed = bool(blocks.blocks), blocks.are_streamed
        self._modes = activation_modes(
            "auto", on_gpu=plan.on_gpu, has_blocks=has_blocks, streamed=streamed
        )
        self._requested = replace(plan, rows=ROWS, tokens=tokens, activations=self._modes[0])
        self._plan = self._requested
        self._scale = LossScale(needed=plan.on_gpu and plan.dtype == "float16")
        self._task: DatumTask | None = None
        self._costs: dict[tuple[int, int], list[tuple[Activations, float]]] = {}

    @property
    def task(self) -> DatumTask:
        """How rows go through the model: made when it is first needed, as it runs the model."""
        if self._task is None:
            with evaluating(self.model):
                self._task = DatumTask(self.model, self.base.tokenizer)
        return self._task

    def head(self) -> Head | None:
        """Return the model's head with what is on it; None: it cannot be had apart."""
        bare, module = self.task.head, find_head(self.model)
        if bare is None or module is None:
            return None
        return Head(module, bare.scale, bare.cap, bare.chunk_bytes)

    def new(self, method: LoRA, seed: int, *, fresh: bool) -> Tenant:
        """Return a new tenant.

        Args:
            fresh: Whether to set initial values; False: they are loaded next.

        Raises:
            TargetError: The method does not suit the model.
        """
        with lifted(self.model):
            tenant = Tenant(attach(self.model, method, seed=seed, fresh=fresh))
            group_modules(self.model)
        return tenant

    @contextmanager
    def on(self, tenant: Tenant) -> Iterator[None]:
        """Have a tenant's modules on the base within the context."""
        with lifted(self.model):
            for path, module in tenant.adapter.modules.items():
                self.model.set_submodule(path, module)
            yield

    @contextmanager
    def seated(self, tenant: Tenant, activations: Activations = "keep") -> Iterator[None]:
        """Have a tenant on the base within the context, ready to learn.

        No module drops anything: log-probabilities are those of answers.
        """
        task, model = self.task, self.model
        with self.on(tenant), modes_kept(model), ExitStack() as stack:
            model.eval()
            for module in tenant.adapter.modules.values():
                module.training = True  # itself alone: it computes with its group
            if self._plan.fused_kernels:
                stack.enter_context(fused_modules(model))
            if activations != "keep":
                blocks = Blocks(model, self._plan)
                stack.callback(blocks.restore)
                blocks.set_activations(activations)
                for module in model.modules():
                    if hasattr(module, "gradient_checkpointing"):
                        module.training = True  # else transformers recomputes nothing
            stack.enter_context(task.training(model, self._plan))
            yield

    def forward(
        self, tenant: Tenant, rows: Sequence[Datum], loss: Loss, settings: Settings, backward: bool
    ) -> tuple[Found, float]:
        """Return what is found of each row, and the sum of losses; gradients are added.

        Raises:
            DoesNotFit: A row is too long.
        """
        planned = plan = self._planned(tenant, rows) if backward else self._plan
        before = tenant.take_gradients()
        try:
            while True:
                outputs, factor = None, self._scale.factor  # of this pass: then it may grow
                try:
                    with self.seated(tenant, plan.activations if backward else "keep"):
                        outputs = self._passes(rows, loss, settings, plan, backward)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                if outputs is not None and (not backward or self._is_finite(tenant)):
                    break
                tenant.take_gradients()
                if outputs is None:  # outside of `except`, whose traceback holds the activations
                    refresh_copies(tenant.layers)
                    release_memory()
                    plan = self._smaller(plan, rows)
        except BaseException:
            tenant.set_gradients(before)
            refresh_copies(tenant.layers)
            raise
        if plan is not planned:
            self._plan = plan  # others begin with it: not with one that fitted nothing
        tenant.add_gradients(before, 1 / factor)
        return outputs

    def _is_finite(self, tenant: Tenant) -> bool:
        """Whether gradients of 16-bit floats are finite; else their factor is lower next time."""
        gradients = [p.grad for p in tenant.parameters.values() if p.grad is not None]
        if not self._scale.needed or all(bool(each.isfinite().all()) for each in gradients):
            self._scale.went_well()
            return True
        return not self._scale.overflowed()

    def _passes(
        self,
        rows: Sequence[Datum],
        loss: Loss,
        settings: Settings,
        plan: ExecutionPlan,
        backward: bool,
    ) -> tuple[Found, float]:
        task, head, outputs = self.task, self.head(), dict[int, dict[str, Tensor]]()
        total = torch.zeros((), dtype=torch.float64)
        for part in self._parts(rows, plan):
            learns = backward and any(bool(loss.is_learnt(row.inputs).any()) for row in part)
            with torch.set_grad_enabled(learns):
                summed, *columns = task.losses(self.model, head, part, loss, settings)
                if learns:
                    (summed * self._scale.factor).backward()
            task.layout.forget()
            sizes = [len(row.input_ids) for row in part]
            parts = (each.float().cpu().split(sizes) for each in columns)
            for row, log_probs, losses in zip(part, *parts, strict=True):
                outputs[id(row)] = {"logprobs": log_probs, "elementwise_loss": losses}
                total += losses.double().sum()
        return [outputs[id(row)] for row in rows], float(total)

    def _parts(self, rows: Sequence[Datum], plan: ExecutionPlan) -> list[Sequence[Datum]]:
        positions = self.task.num_positions
        return split_micro_batches(
            rows, positions, plan.rows, plan.tokens, lambda row: row.num_targets
        )

    def _planned(self, tenant: Tenant, rows: Sequence[Datum]) -> ExecutionPlan:
        """Return the plan by which rows fit into the memory that is free.

        Raises:
            DoesNotFit: The longest row does not.
        """
        environment = free_now(self.model.device)
        if environment.memory is None:
            return self._plan
        costs, longest = self._costs_of(tenant), _longest(rows)
        available = AUTO_SHARE * environment.usable - tenant.num_later
        requested = replace(self._plan, rows=min(ROWS, len(rows)))
        plan = choose(requested, costs, available, self.task.num_positions([longest]))
        if plan is None:
            raise _too_long(longest, int(max(available, 0) / min(cost for _, cost in costs)))
        return replace(plan, rows=self._plan.rows)

    def _costs_of(self, tenant: Tenant) -> list[tuple[Activations, float]]:
        """Return the bytes that a token's activations take, by mode; counted once for each size."""
        key = tenant.num_bytes, len(tenant.parameters)
        if key not in self._costs:
            size = min(PROBE, context_length(self.model) or PROBE)
            row = Datum.of([3 + n % 5 for n in range(size)])
            loss, blocks = LOSSES["cross_entropy"], Blocks(self.model).blocks
            with self.seated(tenant), torch.enable_grad():
                tokens, head = self.task.num_positions([row]), self.head()
                saved = saved_by(
                    lambda: self.task.losses(self.model, head, [row], loss, Settings())[0], blocks
                )
                self.task.layout.forget()
            refresh_copies(tenant.layers)
            modes = self._modes
            self._costs[key] = [(mode, max(1.0, saved.needed(mode) / tokens)) for mode in modes]
        return self._costs[key]

    def _smaller(self, plan: ExecutionPlan, rows: Sequence[Datum]) -> ExecutionPlan:
        """Return the next plan after one that ran out of memory.

        Raises:
            DoesNotFit: There is none.
        """
        parts = self._parts(rows, plan)
        most, tokens = max(map(len, parts)), max(map(self.task.num_positions, parts))
        less = smaller(plan, self._requested, self._modes, rows=most, tokens=tokens)
        if less is None:
            raise _too_long(_longest(rows))
        return less


def _longest(rows: Sequence[Datum]) -> Datum:
    return max(rows, key=lambda row: len(row.input_ids))


def _too_long(row: Datum, fitting: int = 0) -> DoesNotFit:
    more = f" Rows of {fitting:,} tokens would fit." if fitting else ""
    return DoesNotFit(
        f"{row.source} alone does not fit into memory.",
        found=f"It has {len(row.input_ids):,} tokens.{more}",
        fix="Send shorter rows, or serve the base in 4 bits (--quantize nf4).",
    )
