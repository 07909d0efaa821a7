"""Train tenants over one base: an operation attaches a tenant and detaches it afterwards.

An operation adds its complete gradient to a tenant's, or nothing. If memory runs out, it repeats
with a smaller plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from peftkit.adapter import attach, group_modules, refresh_copies
from peftkit.base.load import Base
from peftkit.execution.environment import AUTO_SHARE, free_now
from peftkit.execution.out_of_memory import attempt
from peftkit.execution.plan import CPU_TOKENS, GPU_TOKENS, Activations, ExecutionPlan
from peftkit.forward.blocks import Blocks
from peftkit.forward.fused import fused_modules
from peftkit.forward.loss import Head, find_head
from peftkit.forward.row_lengths import context_length
from peftkit.methods.lora import LoRA
from peftkit.model.modes import evaluating, lifted, modes_kept
from peftkit.tasks.batches import split_micro_batches
from peftkit.train.fitting import Costs, Fitting, choose, saved_by
from peftkit_server.refusals import RequestError
from peftkit_server.tinker.losses import LOSSES, Loss, Settings
from peftkit_server.tinker.rows import Datum, DatumTask
from peftkit_server.tinker.tenant import Tenant

ROWS = 1024
"""Maximum rows of a micro-batch."""
PROBE = 64
"""Tokens of the row that measures the activations."""

Outputs = list[dict[str, Tensor]]
"""`logprobs` and `elementwise_loss` of each datum."""


class DoesNotFit(RequestError):
    """A row does not fit into the free memory."""


class Learner:
    """A base over which tenants train in turn, called by one thread."""

    def __init__(self, base: Base) -> None:
        self.base, self.model = base, base.model
        plan = ExecutionPlan.for_model(base.model)
        plan = replace(plan, rows=ROWS, tokens=GPU_TOKENS if plan.on_gpu else CPU_TOKENS)
        self.fitting = Fitting(
            plan,
            Blocks(base.model).activation_modes("auto"),
            lambda rows: self.task.num_positions(rows),
            needs_scale=plan.on_gpu and plan.dtype == "float16",
        )
        self.plan = self.fitting.requested
        self._task: DatumTask | None = None
        self._costs: dict[tuple[int, int], Costs] = {}

    @property
    def task(self) -> DatumTask:
        """The task, made at its first use, since it runs the model."""
        if self._task is None:
            with evaluating(self.model):
                self._task = DatumTask(self.model, self.base.tokenizer)
        return self._task

    def head(self) -> Head | None:
        """Return the model's head with its adapter; None if it cannot run separately."""
        bare, module = self.task.head, find_head(self.model)
        if bare is None or module is None:
            return None
        return Head(module, bare.scale, bare.cap, bare.chunk_bytes)

    def new(self, method: LoRA, seed: int, *, fresh: bool) -> Tenant:
        """Return a new tenant.

        Args:
            fresh: Whether to set initial values; False if they are loaded next.

        Raises:
            TargetError: The method does not suit the model.
        """
        with lifted(self.model):
            tenant = Tenant(attach(self.model, method, seed=seed, fresh=fresh))
            group_modules(self.model)
        return tenant

    @contextmanager
    def on(self, tenant: Tenant) -> Iterator[None]:
        """Attach a tenant's modules to the base within the context."""
        with lifted(self.model):
            for path, module in tenant.adapter.modules.items():
                self.model.set_submodule(path, module)
            yield

    @contextmanager
    def seated(self, tenant: Tenant, activations: Activations = "keep") -> Iterator[None]:
        """Attach a tenant and prepare the model for training within the context.

        Dropout is off, so log-probabilities equal the log-probabilities of sampling.
        """
        task, model = self.task, self.model
        with self.on(tenant), modes_kept(model), ExitStack() as stack:
            model.eval()
            for module in tenant.adapter.modules.values():
                module.training = True  # not its children: it computes with its group
            if self.plan.fused_kernels:
                stack.enter_context(fused_modules(model))
            if activations != "keep":
                blocks = Blocks(model, self.plan)
                stack.callback(blocks.restore)
                blocks.set_activations(activations)
                for module in model.modules():
                    if hasattr(module, "gradient_checkpointing"):
                        module.training = True  # otherwise transformers recomputes nothing
            stack.enter_context(task.training(model, self.plan))
            yield

    def forward(
        self, tenant: Tenant, rows: Sequence[Datum], loss: Loss, settings: Settings, backward: bool
    ) -> tuple[Outputs, float]:
        """Return the outputs of each row and the sum of losses; add to the tenant's gradients.

        Raises:
            DoesNotFit: A row is too long.
        """
        scale = self.fitting.scale
        planned = plan = self._planned(tenant, rows) if backward else self.plan
        before = tenant.take_gradients()

        def undo() -> None:
            tenant.take_gradients()
            refresh_copies(tenant.layers)

        def passes() -> tuple[Outputs, float]:
            with self.seated(tenant, plan.activations if backward else "keep"):
                return self._passes(rows, loss, settings, plan, backward)

        def compute() -> tuple[tuple[Outputs, float], float] | None:
            factor = scale.factor  # `overflows` may change it after the pass
            outputs = attempt(passes, undo=undo)
            return None if outputs is None else (outputs, factor)

        def overflows(_: object) -> bool:
            gradients = [p.grad for p in tenant.parameters.values() if p.grad is not None]
            if scale.needed and not all(bool(grad.isfinite().all()) for grad in gradients):
                return backward
            if backward:
                scale.went_well()
            return False

        def step_down() -> None:
            nonlocal plan
            smaller = self.fitting.smaller(plan, self._parts(rows, plan))
            if smaller is None:
                raise _too_long(_longest(rows))
            plan = smaller

        try:
            outputs, factor = self.fitting.retry(
                compute, overflows=overflows, step_down=step_down, undo=tenant.take_gradients
            )
        except BaseException:
            tenant.set_gradients(before)
            refresh_copies(tenant.layers)
            raise
        if plan is not planned:
            self.plan = plan  # later operations start with it, unless no row fitted
        tenant.add_gradients(before, 1 / factor)
        return outputs

    def _passes(
        self,
        rows: Sequence[Datum],
        loss: Loss,
        settings: Settings,
        plan: ExecutionPlan,
        backward: bool,
    ) -> tuple[Outputs, float]:
        task, head, outputs = self.task, self.head(), dict[int, dict[str, Tensor]]()
        total = torch.zeros((), dtype=torch.float64)
        for part in self._parts(rows, plan):
            learns = backward and any(bool(loss.is_learnt(row.inputs).any()) for row in part)
            with torch.set_grad_enabled(learns):
                summed, *columns = task.losses(self.model, head, part, loss, settings)
                if learns:
                    (summed * self.fitting.scale.factor).backward()
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
        """Return the plan with which rows fit into the free memory.

        Raises:
            DoesNotFit: The longest row does not fit.
        """
        environment = free_now(self.model.device)
        if environment.memory is None:
            return self.plan
        costs, longest = self._costs_of(tenant), _longest(rows)
        available = AUTO_SHARE * environment.usable - tenant.num_later
        requested = replace(self.plan, rows=min(ROWS, len(rows)))
        plan = choose(requested, costs, available, self.task.num_positions([longest]))
        if plan is None:
            raise _too_long(longest, int(max(available, 0) / min(cost for _, cost in costs)))
        return replace(plan, rows=self.plan.rows)

    def _costs_of(self, tenant: Tenant) -> Costs:
        """Return the costs of each activation mode, counted once for each adapter size."""
        key = tenant.num_bytes, len(tenant.parameters)
        if key not in self._costs:
            length = min(PROBE, context_length(self.model.config) or PROBE)
            row = Datum.of([3 + n % 5 for n in range(length)])
            loss, blocks = LOSSES["cross_entropy"], Blocks(self.model).blocks
            with self.seated(tenant), torch.enable_grad():
                head = self.head()
                saved = saved_by(
                    lambda: self.task.losses(self.model, head, [row], loss, Settings())[0], blocks
                )
                self.task.layout.forget()
            refresh_copies(tenant.layers)
            self._costs[key] = self.fitting.costs((saved, [row]))
        return self._costs[key]


def _longest(rows: Sequence[Datum]) -> Datum:
    return max(rows, key=lambda row: len(row.input_ids))


def _too_long(row: Datum, fitting: int = 0) -> DoesNotFit:
    more = f" Rows of {fitting:,} tokens would fit." if fitting else ""
    return DoesNotFit(
        f"{row.source} alone does not fit into memory.",
        found=f"It has {len(row.input_ids):,} tokens.{more}",
        fix="Send shorter rows, or serve the base in 4 bits (--quantize nf4).",
    )
