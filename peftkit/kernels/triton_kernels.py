"""Kernels of fused.py in Triton, which compute in float32.

Gated activations: y = f(g) u, and dg = dy u f'(g), du = dy f(g). Rotations: of the halves of a head
y1 = x1 c1 - x2 s1 and y2 = x2 c2 + x1 s2; backwards dx1 = dy1 c1 + dy2 s2, dx2 = dy2 c2 - dy1 s1.

Parameters of kernels have no annotations but tl.constexpr: Triton reads them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Values per program."""
NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
"""KIND of each activation."""


@triton.jit
def _activated(g, KIND: tl.constexpr):
    """Return f(g) and f'(g)."""
    if KIND == 0:
        share = 1 / (1 + tl.exp(-g))
        return g * share, share * (1 + g * (1 - share))
    if KIND == 1:
        below = 0.5 * (1 + tl.erf(g * 0.7071067811865476))
        return g * below, below + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    inner = 1.5957691216057308 * (g + 0.044715 * g * g * g)  # tanh(x) = 2 / (1 + exp(-2 x)) - 1
    share = 1 / (1 + tl.exp(-inner))
    slope = 1.5957691216057308 * (1 + 3 * 0.044715 * g * g)
    return g * share, share + g * share * (1 - share) * slope


@triton.jit
def gated_kernel(gate, up, out, number, KIND: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < number
    g = tl.load(gate + place, inside, 0.0).to(tl.float32)
    u = tl.load(up + place, inside, 0.0).to(tl.float32)
    value, _ = _activated(g, KIND)
    tl.store(out + place, (value * u).to(out.dtype.element_ty), inside)


@triton.jit
def gated_backward_kernel(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    number,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < number
    dy = tl.load(grad + place, inside, 0.0).to(tl.float32)
    g = tl.load(gate + place, inside, 0.0).to(tl.float32)
    u = tl.load(up + place, inside, 0.0).to(tl.float32)
    value, slope = _activated(g, KIND)
    tl.store(grad_gate + place, (dy * u * slope).to(grad_gate.dtype.element_ty), inside)
    tl.store(grad_up + place, (dy * value).to(grad_up.dtype.element_ty), inside)


def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return f(g) u of contiguous tensors."""
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    gated_kernel[grid](gate, up, out, gate.numel(), KIND=NUMBERS[name], SIZE=BLOCK)
    return out


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of g and u, all contiguous."""
    gradients = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    number = gate.numel()
    gated_backward_kernel[grid](grad, gate, up, *gradients, number, KIND=NUMBERS[name], SIZE=BLOCK)
    return gradients


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    out,
    heads,
    length,
    x_row,
    x_head,
    x_token,
    out_row,
    out_head,
    out_token,
    cos_row,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    BACK: tl.constexpr,
):
    # one axis of the grid: the others have 65,535 programs at most
    parts = tl.cdiv(length, TOKENS)
    of_head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, head = of_head // heads, of_head % heads
    token = part.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    place = tl.arange(0, PADDED)[None, :]
    inside = (token < length) & (place < HALF)
    angle = row.to(tl.int64) * cos_row + token * (2 * HALF) + place
    c1 = tl.load(cos + angle, inside, 0.0).to(tl.float32)
    c2 = tl.load(cos + angle + HALF, inside, 0.0).to(tl.float32)
    s1 = tl.load(sin + angle, inside, 0.0).to(tl.float32)
    s2 = tl.load(sin + angle + HALF, inside, 0.0).to(tl.float32)
    offset = row.to(tl.int64) * x_row + head.to(tl.int64) * x_head + token * x_token + place
    first = tl.load(x + offset, inside, 0.0).to(tl.float32)
    second = tl.load(x + offset + HALF, inside, 0.0).to(tl.float32)
    if BACK:
        y1, y2 = first * c1 + second * s2, second * c2 - first * s1
    else:
        y1, y2 = first * c1 - second * s1, second * c2 + first * s2
    offset = row.to(tl.int64) * out_row + head.to(tl.int64) * out_head + token * out_token + place
    tl.store(out + offset, y1.to(out.dtype.element_ty), inside)
    tl.store(out + offset + HALF, y2.to(out.dtype.element_ty), inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, back: bool) -> Tensor:
    """Write x (B, H, T, D) rotated into `out`; D is contiguous, and so are cosines and sines."""
    batch, heads, length, size = x.shape
    padded = triton.next_power_of_2(size // 2)
    tokens = max(1, BLOCK // 2 // padded)
    grid = (triton.cdiv(length, tokens) * batch * heads,)
    rotary_kernel[grid](
        x,
        cos,
        sin,
        out,
        heads,
        length,
        *x.stride()[:3],
        *out.stride()[:3],
        cos.stride(0) if len(cos) > 1 else 0,
        HALF=size // 2,
        PADDED=padded,
        TOKENS=tokens,
        BACK=back,
    )
    return out
