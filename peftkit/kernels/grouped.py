"""Several adapted layers that read one input, without a product of their own for the updates.

With a layer's frozen weight and its scaled B side by side, one product gives base and update, and
one gives back the gradient of the input and of the hidden rows:

    y = [X | X A^T] [W | s B]^T        [dX' | G] = sum over layers of dy [W | s B]
    dX = dX' + G A        dA = G^T X        dB = s dy^T (X A^T)

The layers' weights are stacked, their A too, and s B is block-diagonal. Each layer's output is an
array of its own: parts of a common one would come back from autograd one by one, each filled up
with zeros to the size of all. Neither B A nor dW is formed.

Shapes: M rows of input, R columns of A and B (the ranks' sum, rounded up), in; out of all members.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

ALIGNMENT = 16
"""R is a multiple of this: matrix products like their dimensions even."""


class Member(NamedTuple):
    """The part of one layer in a group: rows of W, columns of the hidden rows."""

    num_out: int
    num_hidden: int


@torch.library.custom_op("peftkit::fill_hidden", mutates_args=("both",))
def fill_hidden(both: Tensor, dropped: Tensor | None, lora_a: Tensor) -> None:
    """Set the last R columns of [X | ...] to X A^T, or to that of X after dropout.

    An operator, for torch.compile would copy all of X to write these few columns.
    """
    x, hidden = both.split([lora_a.shape[1], len(lora_a)], 1)
    hidden.copy_(torch.mm(x if dropped is None else dropped, lora_a.t()))


class GroupedLinear(torch.autograd.Function):
    """y = X W^T + X A^T (s B)^T + b of each member, with gradients of X, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        lora_a: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        members: tuple[Member, ...],
        *masters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return (M, num_out) of each member.

        Args:
            x: (M, in). dropped: The input of A where that is another one, after dropout.
            weight: (out, in + R), [W | s B]. lora_a: (R, in). bias: (out,) or None.
            scales: s of each hidden column that is a member's: a tensor, for torch.compile would
                make new code for another number.
            masters: A of each member, then B of each: what the gradients go to; not read.
        """
        both = torch.cat([x, x.new_empty(len(x), len(lora_a))], 1)  # a compiled block makes x in it
        fill_hidden(both, dropped, lora_a)
        ctx.save_for_backward(both, dropped, weight, lora_a, scales)
        ctx.members, ctx.dtypes = members, [master.dtype for master in masters]
        sizes = [member.num_out for member in members]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return tuple(
            functional.linear(both, part, own)
            for part, own in zip(weight.split(sizes), biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, dropped, and each A and B."""
        both, dropped, weight, lora_a, scales = ctx.saved_tensors
        size = lora_a.shape[1]
        lowest = not ctx.needs_input_grad[0]  # nothing below this group learns
        parts = (weight[:, size:] if lowest else weight).split([m.num_out for m in ctx.members])
        back = torch.mm(grads[0], parts[0])
        for grad, part in zip(grads[1:], parts[1:], strict=True):
            back.addmm_(grad, part)
        grad_x, hidden_grad = (None, back) if lowest else (back[:, :size], back[:, size:])
        grad_dropped = None
        if grad_x is not None and dropped is None:
            grad_x = torch.addmm(grad_x, hidden_grad, lora_a)
        elif grad_x is not None:
            grad_dropped = torch.mm(hidden_grad, lora_a)
        grad_a = torch.mm(hidden_grad.t(), both[:, :size] if dropped is None else dropped)
        grads_a, grads_b, hidden = [], [], both[:, size:]
        start = 0
        for member, grad in zip(ctx.members, grads, strict=True):
            own = slice(start, start + member.num_hidden)
            grads_a.append(grad_a[own])
            grads_b.append(torch.mm(grad.t(), hidden[:, own]) * scales[own])
            start = own.stop
        cast = [g.to(d) for g, d in zip((*grads_a, *grads_b), ctx.dtypes, strict=True)]
        return grad_x, grad_dropped, None, None, None, None, None, *cast


def grouped_linear_reference(
    x: Tensor, weight: Tensor, lora_a: Tensor, bias: Tensor | None
) -> Tensor:
    """Return what `GroupedLinear` computes, by plain products."""
    size = lora_a.shape[1]
    out = functional.linear(x, weight[:, :size], bias)
    return out + x @ lora_a.t() @ weight[:, size:].t()
