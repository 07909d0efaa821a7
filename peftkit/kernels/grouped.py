"""Several adapted layers that read one input, as two matrix products.

With the frozen weights and the scaled B side by side, one product gives base and update of the
whole group, and one gives back the gradient of the input and of the hidden rows:

    Y = [X | X A^T] [W | s B]^T        [dX' | G] = dY [W | s B]
    dX = dX' + G A        dA = G^T X        dB = s dY^T (X A^T)

W stacks the group's weights, A their A, and s B is block-diagonal. Neither B A nor dW is formed.

Shapes: M rows of input, R columns of A and B (the ranks' sum, rounded up), in; out of all members.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

ALIGNMENT = 32
"""R is a multiple of this: matrix products like their dimensions even."""


class Member(NamedTuple):
    """The part of one layer in a group: rows of W, columns of the hidden rows, alpha / r."""

    num_out: int
    num_hidden: int
    scaling: float


class GroupedLinear(torch.autograd.Function):
    """Y = X W^T + X A^T (s B)^T + b, with gradients of X, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        lora_a: Tensor,
        bias: Tensor | None,
        members: tuple[Member, ...],
        *masters: Tensor,
    ) -> Tensor:
        """Return (M, out).

        Args:
            x: (M, in). dropped: The input of A where that is another one, after dropout.
            weight: (out, in + R), [W | s B]. lora_a: (R, in). bias: (out,) or None.
            masters: A of each member, then B of each: what the gradients go to; not read.
        """
        rows, size = x.shape
        both = x.new_empty(rows, weight.shape[1])
        both[:, :size] = x
        both[:, size:] = torch.mm(x if dropped is None else dropped, lora_a.t())
        ctx.save_for_backward(both, dropped, weight, lora_a)
        ctx.members, ctx.dtypes = members, [master.dtype for master in masters]
        return functional.linear(both, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, dropped, and each A and B."""
        both, dropped, weight, lora_a = ctx.saved_tensors
        size = lora_a.shape[1]
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[0]:
            grad_both = torch.mm(grad, weight)
            grad_x, hidden_grad = grad_both[:, :size], grad_both[:, size:]
            if dropped is None:
                grad_x = torch.addmm(grad_x, hidden_grad, lora_a)
            else:
                grad_dropped = torch.mm(hidden_grad, lora_a)
        else:  # the lowest adapter: nothing below it learns
            hidden_grad = torch.mm(grad, weight[:, size:])
        grad_a = torch.mm(hidden_grad.t(), both[:, :size] if dropped is None else dropped)
        grads_a, grads_b, out, hidden = [], [], 0, size
        for member in ctx.members:
            part = grad[:, out : out + member.num_out].t()
            grads_b.append(
                member.scaling * torch.mm(part, both[:, hidden : hidden + member.num_hidden])
            )
            grads_a.append(grad_a[hidden - size : hidden - size + member.num_hidden])
            out, hidden = out + member.num_out, hidden + member.num_hidden
        cast = [g.to(d) for g, d in zip((*grads_a, *grads_b), ctx.dtypes, strict=True)]
        return grad_x, grad_dropped, None, None, None, None, *cast


def grouped_linear_reference(
    x: Tensor, weight: Tensor, lora_a: Tensor, bias: Tensor | None
) -> Tensor:
    """Return what `GroupedLinear` computes, by plain products."""
    size = lora_a.shape[1]
    out = functional.linear(x, weight[:, :size], bias)
    return out + x @ lora_a.t() @ weight[:, size:].t()
