"""Products of LoRA: for one layer, and for several layers that read one input.

    y_i = X W_i^T + b_i + H_i B_i^T        H = X (s A)^T, one product for all layers
    G_i = dy_i B_i        dX = sum over layers of dy_i W_i + G s A
    dA = s G^T X        dB_i = dy_i^T H_i

`grouped_lora_linear` reads the base's weights in place, packed or not: a model that fills a GPU
leaves no room for another layout. Each update is added to the base's product in place, which needs
one array of the output's size instead of two. Neither B A nor dW is formed.

Tensors for the backward pass are saved before the products with the base. Recomputation of a
checkpointed block stops at its last saved tensor and thus skips the block's last product.

Shapes: M rows of input, r rank of a layer, R sum of the ranks, in; out features of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.fused import Recipe
from peftkit.kernels.packed import PackedFormat, PackedWeight, times_packed, unpack


class Layer(NamedTuple):
    """The number and the format of a layer's frozen tensors: weight, scales, bias.

    Attributes:
        form: Format of a packed weight, or None.
        num_scales: Number of scales of a packed weight.
    """

    form: PackedFormat | None
    num_scales: int
    has_bias: bool


def grouped_lora_linear(
    x: Tensor,
    dropped: Tensor | None,
    layers: tuple[Layer, ...],
    frozen: Sequence[Tensor],
    lora_a: Tensor,
    scales: Tensor,
    lora_b: Sequence[Tensor],
    masters: Sequence[Tensor],
    recipe: Recipe | None = None,
) -> tuple[Tensor, ...]:
    """Return y = X W^T + b + X (s A)^T B^T, (M, out), for each layer; X, A and B get gradients.

    Args:
        x: (M, in).
        dropped: X after dropout, which A reads; None without dropout.
        frozen: The tensors of all layers, one layer after the other.
        lora_a, lora_b: s A (R, in) of all layers, and B (out, r) of each layer, in x's dtype.
        scales: (R,), s for each row of A.
        masters: A, then B of each layer: the tensors that receive gradients. They are not read.
        recipe: Computes what A reads, in any shape, in the backward pass; None: it is saved.
    """
    read = x if dropped is None else dropped
    with torch.no_grad():
        hidden = torch.mm(read, lora_a.t())
    tensors = (hidden, lora_a, scales, *lora_b, *frozen)
    first, *others = masters
    saved: list[Any] = []
    compute, inputs, _ = recipe or (None, (read,), 0)
    if not torch.compiler.is_compiling():
        first = Saved.apply(saved, first, *tensors, *inputs)
    outputs: tuple[Tensor, ...] = _GroupedLoRALinear.apply(
        saved, compute, layers, x, dropped, *tensors, first, *others
    )
    return outputs


class Saved(torch.autograd.Function):
    """Saves tensors for the backward pass of a later node, whose input is this node's output."""

    @staticmethod
    def forward(ctx: Any, nodes: list[Any], through: Tensor, *tensors: Tensor | None) -> Tensor:
        """Return `through`, and append this node to `nodes`."""
        ctx.save_for_backward(*tensors)
        ctx.num_tensors = len(tensors)
        nodes.append(ctx)
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `through`."""
        return None, grad, *(None for _ in range(ctx.num_tensors))


class _GroupedLoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        saved: list[Any],
        compute: Callable[..., Tensor] | None,
        layers: tuple[Layer, ...],
        x: Tensor,
        dropped: Tensor | None,
        hidden: Tensor,
        lora_a: Tensor,
        scales: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return (M, out) for each layer.

        Args:
            saved: The node that has saved the tensors; empty if this node must save them.
            compute: Computes what A reads from the last saved tensors; None: the last one is that.
            tensors: B of each layer, the frozen tensors, the masters.
        """
        masters = tensors[-2 * len(layers) :]
        others = tensors[: -2 * len(layers)]
        if not saved:
            read = x if dropped is None else dropped
            ctx.save_for_backward(hidden, lora_a, scales, *others, read)
        ctx.saved, ctx.compute, ctx.layers = saved, compute, layers
        ctx.has_dropout, ctx.num_tensors = dropped is not None, 3 + len(others)
        ctx.dtypes = [master.dtype for master in masters]
        lora_b, frozen = others[: len(layers)], others[len(layers) :]
        hiddens = hidden.split([b.shape[1] for b in lora_b], 1)
        outputs = []
        for layer, h, b in zip(_with_tensors(layers, frozen), hiddens, lora_b, strict=True):
            bias = None if layer.bias is None else layer.bias.to(x.dtype)
            out = functional.linear(x, layer.unpacked(x.dtype), bias)
            # traced by torch 2.11, an output that forward changes in place loses its gradient
            is_traced = torch.compiler.is_compiling()
            outputs.append(torch.addmm(out, h, b.t()) if is_traced else out.addmm_(h, b.t()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, dropped, all A and all B."""
        tensors = (ctx.saved[0] if ctx.saved else ctx).saved_tensors
        inputs = tensors[ctx.num_tensors :]
        hidden, lora_a, scales, *others = tensors[: ctx.num_tensors]
        lora_b, frozen = others[: len(ctx.layers)], others[len(ctx.layers) :]
        ranks = [b.shape[1] for b in lora_b]
        backs = [torch.mm(grad, b) for grad, b in zip(grads, lora_b, strict=True)]
        back = torch.cat(backs, 1) if len(backs) > 1 else backs[0]  # G
        grad_x = grad_dropped = None
        if ctx.needs_input_grad[3]:  # False if nothing below these layers is trained
            for grad, layer in zip(grads, _with_tensors(ctx.layers, frozen), strict=True):
                grad_x = layer.add_product(grad_x, grad)
            assert grad_x is not None
            if ctx.has_dropout:
                grad_dropped = torch.mm(back, lora_a)
            else:
                grad_x.addmm_(back, lora_a)
        read = inputs[0] if ctx.compute is None else ctx.compute(*inputs)
        read = read.reshape(-1, read.shape[-1]).to(lora_a.dtype)
        grad_a = torch.mm(back.t(), read) * scales[:, None]
        hiddens = hidden.split(ranks, 1)
        grads_b = [torch.mm(grad.t(), h) for grad, h in zip(grads, hiddens, strict=True)]
        master_grads = zip([*grad_a.split(ranks), *grads_b], ctx.dtypes, strict=True)
        grads_of_masters = [grad.to(dtype) for grad, dtype in master_grads]
        no_grads = [None] * ctx.num_tensors
        return None, None, None, grad_x, grad_dropped, *no_grads, *grads_of_masters


class _Frozen(NamedTuple):
    weight: Tensor | PackedWeight
    bias: Tensor | None

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        if isinstance(self.weight, PackedWeight):
            return unpack(self.weight, dtype)
        return self.weight.to(dtype)  # another dtype under autocast

    def add_product(self, total: Tensor | None, grad: Tensor) -> Tensor:
        """Return total + dy W, in place if not traced; dy W if there is no total."""
        if total is not None and not torch.compiler.is_compiling():
            return total.addmm_(grad, self.unpacked(grad.dtype))  # else cuBLAS copies it first
        if isinstance(self.weight, PackedWeight):
            packed, scales, form = self.weight
            return times_packed(grad, packed, scales, *form, total)
        weight = self.weight.to(grad.dtype)
        return torch.mm(grad, weight) if total is None else torch.addmm(total, grad, weight)


def _with_tensors(layers: Sequence[Layer], frozen: Sequence[Tensor]) -> list[_Frozen]:
    """Return each layer with its frozen tensors."""
    filled, rest = [], iter(frozen)
    for form, num_scales, has_bias in layers:
        data, scales = next(rest), tuple(islice(rest, num_scales))
        weight = data if form is None else PackedWeight(data, scales, form)
        filled.append(_Frozen(weight, next(rest) if has_bias else None))
    return filled


def add_lora(base_out: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """Return ``base_out + scaling * x A^T B^T`` (Hu et al., 2021, eq. 3).

    The scaled B and one addmm need no temporary of the output's size, and autograd's formulas are
    then minimal: G = dY (sB), dA = G^T x, dB = s dY^T (x A^T), dx = G A.

    Args:
        base_out: (..., out), the frozen layer's output.
        x: (..., in), the layer's input (after dropout).
        lora_a: (R, in). lora_b: (out, R). Both are cast to `base_out`'s dtype here.
        scaling: alpha / r.
    """
    dtype = base_out.dtype
    hidden = functional.linear(x.to(dtype), lora_a.to(dtype))  # (..., R)
    scaled_b = (scaling * lora_b).to(dtype)  # (out, R), scaled in the adapter's precision
    flat = torch.addmm(
        base_out.reshape(-1, base_out.shape[-1]),
        hidden.reshape(-1, hidden.shape[-1]),
        scaled_b.t(),
    )
    return flat.view(base_out.shape)


def low_rank(x: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """Return ``x A^T B^T`` (..., out); shapes as in `add_lora`."""
    return functional.linear(functional.linear(x, lora_a.to(x.dtype)), lora_b.to(x.dtype))


def adapted_row_norms(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, squared_norms: Tensor
) -> Tensor:
    """Return ||W + s B A|| of each output row without forming the sum.

    ||w + s b A||^2 = ||w||^2 + 2 s b (A w) + s^2 b (A A^T) b^T for a row w of W and b of B.

    Args:
        weight: (out, in). lora_a: (R, in). lora_b: (out, R).
        squared_norms: (out,), ||w||^2, constant during training.

    Returns:
        (out,) float32.
    """
    a, b = lora_a.float(), lora_b.float()
    cross = functional.linear(weight, lora_a.to(weight.dtype)).float()  # (out, R) = W A^T
    gram = a @ a.t()  # (R, R)
    squared = squared_norms + ((2 * scaling) * cross + (scaling * scaling) * (b @ gram)).mul(b).sum(
        1
    )
    return squared.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
