"""RMSNorm by one kernel each way: y = x w / sqrt(mean(x^2) + eps), in float32, rounded once.

Written out in torch it is eight kernels, which move seven times as much and save x in float32.

Shapes: n values of a row; `...` is any leading shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.autograd.Function):
    """y (..., n) of x (..., n) and a frozen weight (n,) of x's dtype, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return y; the weight is frozen."""
        out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x; the scales (..., 1) are in float32."""
        x, weight, scale = ctx.saved_tensors
        if x.device.type == "cuda":
            found = torch.ops.aten._fused_rms_norm_backward(
                grad, x, weight.shape, scale, weight, [True, False]
            )
            return found[0], None, None
        return gradient(grad, x, weight, scale), None, None


def gradient(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return dx = scale (w dy - n mean(n w dy)), where n = x scale: what the kernel computes."""
    normal, back = x.float() * scale, grad.float() * weight.float()
    return (scale * (back - normal * (normal * back).mean(-1, keepdim=True))).to(x.dtype)
