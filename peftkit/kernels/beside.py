"""Several adapted layers that read one input, their updates beside the products with the base.

    y_i = X W_i^T + b_i + H_i B_i^T        H = X (s A)^T, one product for all layers
    G_i = dy_i B_i        dX = sum over layers of dy_i W_i + G s A
    dA = s G^T X        dB_i = dy_i^T H_i

The base's weights are read as they lie, packed ones too: nothing is laid out anew, which for a
model that fills a GPU would not fit. Each update is added to the base's product where that stands:
one array of the output's size, not two. Neither B A nor dW is formed.

What the backward pass needs is saved before the products with the base are made. A block that is
recomputed ends with its last saved tensor, so that its last product is not made a second time.

Shapes: M rows of input, R sum of the ranks, in; out of each layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.packed import Form, times_packed, unpack


class Layer(NamedTuple):
    """One layer of the group, and which of the tensors are its own.

    Attributes:
        num_hidden: Its rank.
        form: How its weight is packed; None: it is not, and `num_tensors` is one.
        num_tensors: The weight and its scales.
        has_bias: Whether a bias follows them.
    """

    num_hidden: int
    form: Form | None
    num_tensors: int
    has_bias: bool


def beside(
    x: Tensor,
    dropped: Tensor | None,
    lora_a: Tensor,
    scales: Tensor,
    layers: tuple[Layer, ...],
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """Return y = X W^T + b + X (s A)^T B^T, (M, out), of each layer; X, A and B have gradients.

    Args:
        x: (M, in). dropped: The input of A where that is another one, after dropout.
        lora_a: (R, in), s A, in x's dtype. scales: (R,), s of each of its rows.
        tensors: B (out, r) of each layer; then of each its weight, scales and bias; then A and
            then B of each: what the gradients go to; not read.
    """
    with torch.no_grad():
        hidden = torch.mm(x if dropped is None else dropped, lora_a.t())
    given = x, dropped, hidden, lora_a, scales
    saved: list[Any] = []
    if not torch.compiler.is_compiling():
        lora_b, base, (first, *masters) = _parted(layers, tensors)
        frozen = (*lora_b, *_flat(base))
        tensors = (*frozen, Saved.apply(saved, first, *given, *frozen), *masters)
    found: tuple[Tensor, ...] = BesideLinear.apply(saved, layers, *given, *tensors)
    return found


class Saved(torch.autograd.Function):
    """Saves tensors for the backward pass of a node after it, whose input is what this returns."""

    @staticmethod
    def forward(ctx: Any, nodes: list[Any], through: Tensor, *tensors: Tensor | None) -> Tensor:
        """Return `through` as it is, and put this node into `nodes`."""
        ctx.save_for_backward(*tensors)
        ctx.num_tensors = len(tensors)
        nodes.append(ctx)
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `through`."""
        return None, grad, *(None for _ in range(ctx.num_tensors))


class BesideLinear(torch.autograd.Function):
    """The product of `beside`, with gradients of X, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        saved: list[Any],
        layers: tuple[Layer, ...],
        x: Tensor,
        dropped: Tensor | None,
        hidden: Tensor,
        lora_a: Tensor,
        scales: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return (M, out) of each layer.

        Args:
            saved: The node that has saved what the backward pass needs; empty: this one does.
            hidden: (M, R), H. The others are those of `beside`.
        """
        lora_b, base, masters = _parted(layers, tensors)
        if not saved:
            given = x, dropped, hidden, lora_a, scales
            ctx.save_for_backward(*given, *lora_b, *_flat(base))
        ctx.saved, ctx.layers, ctx.dtypes = saved, layers, [master.dtype for master in masters]
        outputs = []
        parts = hidden.split([layer.num_hidden for layer in layers], 1)
        for layer, own, b, part in zip(layers, base, lora_b, parts, strict=True):
            bias = own[-1].to(x.dtype) if layer.has_bias else None
            out = functional.linear(x, _weight(layer, own, x.dtype), bias)
            outputs.append(out.addmm_(part, b.t()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, dropped, and each A and B."""
        x, dropped, hidden, lora_a, scales, *rest = (
            ctx.saved[0] if ctx.saved else ctx
        ).saved_tensors
        layers: tuple[Layer, ...] = ctx.layers
        lora_b, base, _ = _parted(layers, rest)
        backs = [torch.mm(grad, b) for grad, b in zip(grads, lora_b, strict=True)]
        back = torch.cat(backs, 1) if len(backs) > 1 else backs[0]
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[2]:  # else nothing below these layers learns
            for grad, layer, own in zip(grads, layers, base, strict=True):
                grad_x = _add_product(grad_x, grad, layer, own)
            assert grad_x is not None
            if dropped is None:
                grad_x = torch.addmm(grad_x, back, lora_a)
            else:
                grad_dropped = torch.mm(back, lora_a)
        grad_a = torch.mm(back.t(), x if dropped is None else dropped) * scales[:, None]
        sizes = [layer.num_hidden for layer in layers]
        parts = hidden.split(sizes, 1)
        grads_b = [torch.mm(grad.t(), part) for grad, part in zip(grads, parts, strict=True)]
        own_grads = (*grad_a.split(sizes), *grads_b)
        cast = [g.to(dtype) for g, dtype in zip(own_grads, ctx.dtypes, strict=True)]
        nothing = [None] * (3 + len(lora_b) + sum(map(len, base)))
        return None, None, grad_x, grad_dropped, *nothing, *cast


def _parted(
    layers: tuple[Layer, ...], tensors: Any
) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """Return B of each layer, what its base has, and all that is left."""
    lora_b, rest = list(tensors[: len(layers)]), list(tensors[len(layers) :])
    base = []
    for layer in layers:
        count = layer.num_tensors + layer.has_bias
        base.append(rest[:count])
        rest = rest[count:]
    return lora_b, base, rest


def _flat(base: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for own in base for tensor in own]


def _weight(layer: Layer, own: list[Tensor], dtype: torch.dtype) -> Tensor:
    if layer.form is None:
        return own[0].to(dtype)  # of another one under autocast
    return unpack(own[0], tuple(own[1 : layer.num_tensors]), layer.form, dtype)


def _add_product(total: Tensor | None, grad: Tensor, layer: Layer, own: list[Tensor]) -> Tensor:
    """Return total + dy W; dy W where there is no total yet."""
    if layer.form is not None:
        return times_packed(grad, own[0], own[1 : layer.num_tensors], *layer.form, total)
    weight = own[0].to(grad.dtype)
    return torch.mm(grad, weight) if total is None else torch.addmm(total, grad, weight)
