"""Packed weights: quantise, dequantise, and multiply with one that stays packed for the backward pass.

nf4, fp4: 64 consecutive values of the flattened tensor share one absmax (Dettmers et al., 2023,
arXiv:2305.14314); double quantisation keeps these in 8 bits, 256 to a scale. int8: one absmax for
each row. The 4-bit operators are bitsandbytes', which quant.py imports; the bits are the same as
those of its modules. A row that is given to them is always one block: its CPU kernel (0.50) reads
tensors wrongly whose rows are an odd multiple of 32, and compiles itself for odd ones.

Shapes: n values, padded to whole blocks; `...` is any leading shape.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64
NESTED_BLOCK = 256
_CHUNK = 1 << 24  # values quantised at a time: bitsandbytes takes 12 bytes of scratch for each


class Form(NamedTuple):
    """How packed data is read: "nf4", "fp4" or "int8"; the tensor's shape; values per absmax."""

    kind: str
    shape: torch.Size
    block: int = BLOCK


def pack_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and fp32 scales (..., 1), whose product is the tensor (..., in)."""
    rows = tensor.float()
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (rows / scales).round_().to(torch.int8), scales


def pack_4bit(tensor: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return packed values, uint8 (n / 2, 1), and their absmax, fp32 (n / 64,)."""
    flat = tensor.reshape(-1)
    if len(flat) % BLOCK:
        flat = functional.pad(flat, (0, -len(flat) % BLOCK))
    pieces = [
        torch.ops.bitsandbytes.quantize_4bit(chunk.view(-1, BLOCK), BLOCK, kind, torch.uint8)
        for chunk in flat.split(_CHUNK)
    ]
    packed, absmax = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return packed, absmax


def pack_absmax(absmax: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return absmax quantised to 8 bits, and what that takes: its own absmax, code and offset."""
    offset = absmax.mean()
    packed, nested = torch.ops.bitsandbytes.quantize_blockwise(absmax - offset, code, NESTED_BLOCK)
    return packed, nested, code, offset


def unpack(packed: Tensor, scales: tuple[Tensor, ...], form: Form, dtype: torch.dtype) -> Tensor:
    """Return the tensor that was packed, as new memory."""
    if form.kind == "int8":
        return torch.mul(packed, scales[0]).to(dtype)
    absmax = scales[0]
    if len(scales) > 1:
        _, nested, code, offset = scales
        absmax = torch.ops.bitsandbytes.dequantize_blockwise(
            absmax, nested, code, NESTED_BLOCK, torch.float32
        ).add_(offset)
    rows = (absmax.numel(), form.block)
    values = torch.ops.bitsandbytes.dequantize_4bit(
        packed, absmax, form.block, form.kind, rows, dtype
    )
    return values.view(-1)[: math.prod(form.shape)].view(form.shape)


class PackedLinear(torch.autograd.Function):
    """y = x W^T + b of a packed W: saved packed, unpacked again for dx = dy W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        form: Form,
        dtype: torch.dtype,
        packed: Tensor,
        *scales: Tensor,
    ) -> Tensor:
        """Return (..., out); W is unpacked to `dtype`."""
        ctx.save_for_backward(packed, *scales)
        ctx.form = form
        return functional.linear(x, unpack(packed, scales, form, dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return dx and db; nothing else has a gradient."""
        packed, *scales = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ unpack(packed, tuple(scales), ctx.form, grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, grad_bias, None, None, None, *(None for _ in scales)
