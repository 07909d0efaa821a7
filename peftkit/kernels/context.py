"""Context parallelism: the tokens of a row are on several processes, which gather keys and values.

A row is cut into 2 n segments of equal length; process i of n holds segments i and 2 n - 1 - i, so
that causal attention costs all processes the same. Everything but attention works token by token.
Only keys and values are communicated: gathered in the forward pass, their gradients reduced to
their process in the backward pass (as in Llama 3: arXiv:2407.21783, section 3.3.2).

Shapes: B rows, T tokens of a row, L = T / n of them here, H heads, K key heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Context(NamedTuple):
    """The processes that share the tokens of a row.

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


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, context: Context, *, scale: float
) -> Tensor:
    """Return causal attention of this process's queries over all tokens before them: (B, L, H, D).

    Args:
        query: (B, H, L, D). key, value: (B, K, L, D), of this process's tokens.
    """
    from torch.nn.attention.bias import causal_lower_right  # slow to import

    both = context.gathered(torch.cat([key, value], dim=-1))
    key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    outputs = []
    for number, part in zip(context.segments, query.chunk(2, dim=2), strict=True):
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
