"""Context parallelism: causal language modelling of rows split across processes (`Context`).

A process has its part of each row's tokens, their absolute positions, and the targets that they
predict. This is right for models in which attention alone mixes tokens: one short row tests that
before training.

Shapes: B rows, T tokens, L of them on this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from peftkit.errors import ConfigError, RunError
from peftkit.execution.plan import ExecutionPlan, compute_dtype
from peftkit.execution.world import PATIENCE, World
from peftkit.forward.attention import TrainingAttention, training_attention
from peftkit.forward.attention_kernels import SharedRows
from peftkit.forward.loss import accepted, head_of, token_loss, unwrapped
from peftkit.forward.probes import logits_of, rms_difference
from peftkit.model.modes import evaluating
from peftkit.model.places import num_virtual
from peftkit.tasks.base import Task
from peftkit.tasks.tokens import CausalLM, TokenTask
from peftkit.train.lockstep import Lockstep

BY_LENGTH = ("dynamic", "longrope")
"""Rotations that depend on the longest position a process sees."""

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Maximum relative difference of logits to those of an unsplit row; 0.05 in 16 bits."""


@dataclass(frozen=True, slots=True)
class Context(SharedRows):
    """The processes that share the tokens of a row.

    A row is cut into 2 n segments of equal length; process i of n holds segments i and 2 n - 1 - i,
    so that causal attention costs all processes the same. Only keys and values are communicated:
    gathered in the forward pass, their gradients reduced to their process in the backward pass (as
    in Llama 3: arXiv:2407.21783, section 3.3.2).

    Attributes:
        group: Their group of torch.distributed.
        size: n.
        cp_rank: i of this process.
    """

    group: Any
    size: int
    cp_rank: int

    @property
    def segments(self) -> tuple[int, int]:
        """The segments of a row on this process, of 2 n."""
        return self.cp_rank, 2 * self.size - 1 - self.cp_rank

    def places(self, length: int) -> Tensor:
        """Return the positions (L,) of this process's tokens in a row.

        Args:
            length: T, a multiple of 2 n.
        """
        segments = torch.arange(length).chunk(2 * self.size)
        return torch.cat([segments[number] for number in self.segments])

    def gathered(self, own: Tensor) -> Tensor:
        """Gather (..., L, D) of each process to all tokens (..., T, D), in order."""
        parts = _Gather.apply(own, self.group, self.size).unbind(0)
        first, last = zip(*(part.chunk(2, dim=-2) for part in parts), strict=True)
        return torch.cat([*first, *reversed(last)], dim=-2)

    def all_agree(self, is_so: bool, device: torch.device) -> bool:
        """Return whether a condition holds on every process."""
        agreed = torch.tensor([int(is_so)], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.group)
        return bool(agreed.item())

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
        from torch.nn.attention.bias import causal_lower_right  # slow to import

        both = self.gathered(torch.cat([key, value], dim=-1))
        key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs = []
        for number, part in zip(self.segments, query.chunk(2, dim=2), strict=True):
            length = part.shape[2]
            end = (number + 1) * length
            outputs.append(
                scaled_dot_product_attention(
                    part,
                    key[:, :, :end],
                    value[:, :, :end],
                    attn_mask=causal_lower_right(length, end),
                    scale=scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)


class _Gather(torch.autograd.Function):
    """(...) of each process to (n, ...) on all."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, size: int) -> Tensor:
        ctx.group = group
        whole = own.new_empty(size, *own.shape)
        dist.all_gather([*whole.unbind(0)], own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        grad_here = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter(grad_here, [*grad.contiguous().unbind(0)], group=ctx.group)
        return grad_here, None, None


class ContextParallel(Lockstep):
    """Groups of processes; the rows of a group are split across its processes.

    Args:
        size: Processes of a group.

    Raises:
        RunError: The processes do not make up whole groups.
    """

    def __init__(self, world: World, task: Task, size: int, *rows: Sequence[Any]) -> None:
        if world.world_size % size:
            raise RunError(
                f"train.context_parallel: {size} takes groups of {size} processes",
                found=f"There are {world.world_size}.",
            )
        super().__init__(world, task, *rows)
        self.rank, number = divmod(world.rank, size)
        self.size = world.world_size // size
        group, _ = dist.new_subgroups(size, timeout=PATIENCE)
        self.context = Context(group, size, number)

    def adapt(self, task: Task) -> Task:
        if not isinstance(task, CausalLM):
            raise ConfigError(
                f"train.context_parallel does not go with {type(task).__name__}",
                fix="Set train.context_parallel: 1.",
            )
        return ContextParallelTask(task, self.context)


class ContextParallelTask(Task):
    """A causal language model's task on this process's part of each row."""

    predicts_tokens = True

    def __init__(self, task: TokenTask, context: Context) -> None:
        self._task, self._context = task, context
        self._attention: TrainingAttention | None = None

    @property
    def paths(self) -> Mapping[str, str]:
        number = self._context.size
        parts = {"rows": f"padded, each on {number} processes", "attention": "keys gathered"}
        return {**self._task.paths, **parts}

    @contextmanager
    def training(self, model: nn.Module, plan: ExecutionPlan | None = None) -> Iterator[None]:
        """Have attention gather the keys and values of a row.

        Raises:
            ConfigError: The model does not suit it.
        """
        with training_attention(unwrapped(model), plan) as attention:
            self._check(model, attention)
            self._attention, self._head = attention, head_of(model)
            try:
                yield
            finally:
                self._attention = None

    def num_positions(self, rows: Sequence[Any]) -> int:
        longest = max((len(row.input_ids) for row in rows), default=0)
        return len(rows) * 2 * -(-longest // (2 * self._context.size))

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        return own_part(self._task.collate(rows), self._context)

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return batch["targets"].numel()

    def spans(self, row: Any) -> list[tuple[str, str]]:
        return self._task.spans(row)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        assert self._attention is not None, "the model is not being trained"
        self._attention.layout = self._context
        inputs = accepted(model, _inputs(batch))
        targets = batch["targets"]
        return token_loss(model, self._head, inputs, batch["target_index"], targets)[None]

    def _check(self, model: nn.Module, attention: TrainingAttention | None) -> None:
        """Check, on all processes together, that splitting a row does not change its logits."""
        reason = unsuited(model)
        if attention is None:
            reason = "It does not leave its attention to torch's (SDPA)."
        elif not reason:
            reason = _difference(model, attention, self._context)
        if reason:
            raise ConfigError(
                f"train.context_parallel does not go with {type(unwrapped(model)).__name__}",
                found=reason,
                fix="Set train.context_parallel: 1, and train.gradient_checkpointing: true.",
            )


def own_part(batch: Mapping[str, Tensor], context: Context) -> dict[str, Tensor]:
    """Return this process's part of a batch that is padded on the right.

    Args:
        batch: input_ids (B, T); target_index into the flattened (B * T) tokens; targets.

    Returns:
        input_ids, position_ids (B, L); target_index into the flattened (B * L) tokens; targets.
    """
    ids = batch["input_ids"]
    length = ids.shape[1]
    padding = -length % (2 * context.size)
    places = context.places(length + padding)
    number = torch.full((length + padding,), -1)
    number[places] = torch.arange(len(places))
    row, place = batch["target_index"] // length, number[batch["target_index"] % length]
    here = place >= 0
    return {
        "input_ids": pad(ids, (0, padding))[:, places],
        # no token attends to padding, and some models have no position for it
        "position_ids": places.clamp(max=length - 1).expand(len(ids), -1).contiguous(),
        "target_index": (row * len(places) + place)[here],
        "targets": batch["targets"][here],
    }


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the model's arguments; the mask says that a row is one document."""
    return {
        "input_ids": batch["input_ids"],
        "position_ids": batch["position_ids"],
        "attention_mask": torch.ones_like(batch["input_ids"]),
        "use_cache": False,
    }


def unsuited(model: nn.Module) -> str:
    """Return why a model's rows cannot be split, by its modules alone; "" if no module objects."""
    if num_virtual(model):
        return "Its adapter puts virtual tokens before each row."
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        for kind in rope.values() if isinstance(rope, dict) else (rope,):
            if kind in BY_LENGTH:
                return f"Its rotary embedding ({kind}) depends on the length of the row."
    return ""


def _difference(model: nn.Module, attention: TrainingAttention, context: Context) -> str:
    """Run a short row unsplit and split; return why the logits differ, or "" if they do not."""
    bare = unwrapped(model)
    length = 4 * context.size + 1
    vocab = bare.config.get_text_config().vocab_size
    ids = torch.arange(3, 3 + length).mul(7).remainder(vocab)[None]
    nothing = torch.zeros(0, dtype=torch.long)
    part = own_part({"input_ids": ids, "target_index": nothing, "targets": nothing}, context)
    inputs = {name: tensor.to(bare.device) for name, tensor in part.items()}
    real = context.places(length + -length % (2 * context.size)) < length
    with evaluating(model):
        with attention.observing():
            whole = logits_of(model, ids.to(bare.device), {})[0, part["position_ids"][0][real]]
        if not context.all_agree(attention.takes_context, bare.device):
            return "A layer sees not just all tokens before: a window, a bias, capped scores."
        attention.layout = context
        try:
            parts = logits_of(model, inputs["input_ids"], _inputs(inputs))[0, real]
        finally:
            attention.layout = None
    close = CLOSE.get(compute_dtype(bare), 0.05) * rms_difference([whole], None)
    is_same = rms_difference([parts], [whole]) <= close
    if context.all_agree(is_same, bare.device):
        return ""
    return "Its logits for a row change when the row is split."
