"""Rows whose tokens lie on several processes: each has its queries, and gathers keys and values.

A row is cut into 2 n pieces of one length; process i of n holds pieces i and 2 n - 1 - i, so that
causal attention costs all processes the same. Everything but attention takes each token alone.
Only keys and values travel: gathered in the forward pass, their gradients summed where they came
from in the backward pass (as Llama 3 was trained: arXiv:2407.21783, section 3.3.2).

Shapes: B rows, T tokens of a row, L = T / n of them here, H heads, K key heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Context(NamedTuple):
    """The processes that hold rows together.

    Attributes:
        group: Of torch.distributed.
        size: n.
        cp_rank: i, of this process.
    """

    group: Any
    size: int
    cp_rank: int

    @property
    def pieces(self) -> tuple[int, int]:
        """Which of the 2 n pieces of a row are here."""
        return self.cp_rank, 2 * self.size - 1 - self.cp_rank

    def places(self, length: int) -> Tensor:
        """Return which tokens of a row are here (L,).

        Args:
            length: T, a multiple of 2 n.
        """
        pieces = torch.arange(length).chunk(2 * self.size)
        return torch.cat([pieces[number] for number in self.pieces])

    def gathered(self, own: Tensor) -> Tensor:
        """Return all tokens (..., T, D), in their order, of those of each process (..., L, D)."""
        parts = _Gather.apply(own, self.group, self.size).unbind(0)
        first, last = zip(*(part.chunk(2, dim=-2) for part in parts), strict=True)
        return torch.cat([*first, *reversed(last)], dim=-2)

    def all_agree(self, is_so: bool, device: torch.device) -> bool:
        """Tell whether something is so on every process."""
        told = torch.tensor([int(is_so)], device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MIN, group=self.group)
        return bool(told.item())


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, context: Context, *, scale: float
) -> Tensor:
    """Return causal attention of the queries here, over all tokens before them: (B, L, H, D).

    Args:
        query: (B, H, L, D). key, value: (B, K, L, D), of the tokens here.
    """
    from torch.nn.attention.bias import causal_lower_right  # slow to import

    both = context.gathered(torch.cat([key, value], dim=-1))
    key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    found = []
    for number, part in zip(context.pieces, query.chunk(2, dim=2), strict=True):
        length = part.shape[2]
        end = (number + 1) * length
        found.append(
            scaled_dot_product_attention(
                part,
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=causal_lower_right(length, end),
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(found, dim=2).transpose(1, 2)


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
        own = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter(own, [*grad.contiguous().unbind(0)], group=ctx.group)
        return own, None, None
