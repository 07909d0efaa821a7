"""A LoRA layer that computes with its merged weight, quantised: y = fq(round(W + s B A)) x.

`round` is to the dtype of W. A merge of the adapter rounds the same (`merging/merge.py`).

Gradients pass straight through fq (Bengio et al., 2013, arXiv:1308.3432): those of A and B are
LoRA's own, s (dy' x) A' and s B' (dy' x), from x and dy alone. Neither B A nor dW is kept. The
quantised weight is computed once per optimizer step, in float32, and kept in the compute dtype.

Shapes: r rank, out, in features of the layer; `...` is any leading shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.fake_quantize import fake_quantized
from peftkit.quant.weights import weight_of


class FakeQuantized:
    """The forward pass of one layer with its quantised weight.

    Args:
        kind: A format of `kernels/fake_quantize.py`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._weight: Tensor | None = None
        self._versions: tuple[int, int] | None = None

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """Return the output (..., out) of a LoRALinear for x (..., in)."""
        weight = self.weight(layer, x.dtype)
        out: Tensor = _StraightThrough.apply(
            x, layer.full_a(), layer.full_b(), weight, layer.scaling
        )
        bias = getattr(layer.base, "bias", None)
        return out if bias is None else out + bias.to(out.dtype)

    @torch.no_grad()
    def weight(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """Return the quantised weight (out, in); computed again after `forget`.

        Also if A or B was replaced in place: by a reference's values, or an average.
        """
        versions = layer.lora_A._version, layer.lora_B._version
        if self._weight is None or self._weight.dtype != dtype or self._versions != versions:
            weight = weight_of(layer.base)
            # the sum in float32, as in a merge; a product in bfloat16 would move codes
            merged = layer.merged_weight(weight.float()).to(weight.dtype)
            values = fake_quantized(merged.float(), self.kind)
            self._weight, self._versions = values.to(dtype), versions
        return self._weight

    def forget(self) -> None:
        """Compute the weight again at the next call: A or B has changed, maybe not its version."""
        self._versions = None


class _StraightThrough(torch.autograd.Function):
    """y = x Wq^T, with the gradients of y = x (W + s B A)^T; dx is by Wq."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, quantised: Tensor, scaling: float
    ) -> Tensor:
        """Return (..., out)."""
        ctx.save_for_backward(x, a, b)
        # not an activation: it lives as long as the layer, and is constant within a step
        ctx.quantised, ctx.scaling = quantised, scaling
        return functional.linear(x, quantised)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, A and B."""
        x, a, b = ctx.saved_tensors
        flat, rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        back, hidden = flat @ b.to(dy.dtype), rows @ a.to(x.dtype).t()
        grad_a = ctx.scaling * (back.t() @ rows).to(a.dtype)
        grad_b = ctx.scaling * (flat.t() @ hidden).to(b.dtype)
        grad_x = dy @ ctx.quantised if ctx.needs_input_grad[0] else None
        return grad_x, grad_a, grad_b, None, None
