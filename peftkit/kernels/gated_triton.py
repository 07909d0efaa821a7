"""The kernels of gated.py in Triton: y = f(g) u, and dg = dy u f'(g), du = dy f(g), in float32.

Parameters of kernels have no annotations but tl.constexpr: Triton reads them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers of one program."""
NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
"""How kernels tell activations apart."""


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
def forward_kernel(gate, up, out, number, KIND: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < number
    g = tl.load(gate + place, inside, 0.0).to(tl.float32)
    u = tl.load(up + place, inside, 0.0).to(tl.float32)
    value, _ = _activated(g, KIND)
    tl.store(out + place, (value * u).to(out.dtype.element_ty), inside)


@triton.jit
def backward_kernel(
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


def forward(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return f(g) u of contiguous tensors."""
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    forward_kernel[grid](gate, up, out, gate.numel(), KIND=NUMBERS[name], SIZE=BLOCK)
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of g and u, all contiguous."""
    made = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    number = gate.numel()
    backward_kernel[grid](grad, gate, up, *made, number, KIND=NUMBERS[name], SIZE=BLOCK)
    return made
