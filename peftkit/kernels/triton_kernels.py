"""Kernels of fused.py, packed.py and gguf_blocks.py in Triton, which compute in float32.

Gated activations: y = f(g) u, and dg = dy u f'(g), du = dy f(g). Rotations: of the halves of a head
y1 = x1 c1 - x2 s1 and y2 = x2 c2 + x1 s2; backwards dx1 = dy1 c1 + dy2 s2, dx2 = dy2 c2 - dy1 s1.
Values in 4 bits: a level times the absmax of its block, which may be in 8 bits itself.
Blocks of GGUF files: the layouts and formulas equal those in gguf_blocks.py, bit for bit.

Parameters of kernels have no annotations except tl.constexpr, because Triton interprets them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

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
    # one axis of the grid: the others are limited to 65,535 programs
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


IQ4_LOW = tl.constexpr(0xF6EADDCFBFAD9881)
IQ4_HIGH = tl.constexpr(0x7159453526190D01)
"""The 16 levels of IQ4 types, a byte each, the first one lowest."""
E2M1 = tl.constexpr(0x0C08060403020100)
"""The 8 magnitudes of MXFP4, doubled, in the same way."""


@triton.jit
def _byte(block, at):
    return tl.load(block + at).to(tl.int32)


@triton.jit
def _signed(byte):
    return (byte ^ 128) - 128


@triton.jit
def _half(block, at):
    """Return the float16 at an unaligned byte."""
    bits = _byte(block, at) | _byte(block, at + 1) << 8
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _looked_up(table, index):
    """Return the signed byte of a table of eight."""
    shift = ((index & 7) * 8).to(tl.uint64)
    return _signed((table >> shift & 255).to(tl.int32))


@triton.jit
def _iq4(code):
    low = _looked_up(tl.full((1, 1, 1), IQ4_LOW, tl.uint64), code)
    return tl.where(code < 8, low, _looked_up(tl.full((1, 1, 1), IQ4_HIGH, tl.uint64), code))


@triton.jit
def _of_32(block, i, KIND: tl.constexpr):
    """Return the values at places i of blocks of 32."""
    if KIND == "q8_0":
        return _signed(_byte(block, 2 + i)).to(tl.float32) * _half(block, 0)
    if KIND == "mxfp4_gguf":
        code = _byte(block, 1 + i % 16) >> i // 16 * 4 & 15
        level = _looked_up(tl.full((1, 1, 1), E2M1, tl.uint64), code)
        power = _byte(block, 0)
        bits = tl.where(power < 2, 0x200000 << power, power - 1 << 23)  # the first are subnormal
        scale = bits.to(tl.float32, bitcast=True)
        return tl.where(code < 8, level, -level).to(tl.float32) * scale
    d = _half(block, 0)
    if KIND == "iq4_nl":
        return _iq4(_byte(block, 2 + i % 16) >> i // 16 * 4 & 15).to(tl.float32) * d
    FIFTH: tl.constexpr = KIND == "q5_0" or KIND == "q5_1"
    MINIMUM: tl.constexpr = KIND == "q4_1" or KIND == "q5_1"
    before = 4 if MINIMUM else 2
    at = before + 4 if FIFTH else before
    code = _byte(block, at + i % 16) >> i // 16 * 4 & 15
    if FIFTH:
        code |= (_byte(block, before + i // 8) >> i % 8 & 1) << 4
    if MINIMUM:
        return code.to(tl.float32) * d + _half(block, 2)
    return (code - (16 if FIFTH else 8)).to(tl.float32) * d


@triton.jit
def _of_256(block, s, i, KIND: tl.constexpr):
    """Return the values at places i of blocks of 256 with scales s."""
    if KIND == "q6_k":
        low = _byte(block, i // 128 * 64 + i % 64) >> i // 64 % 2 * 4 & 15
        high = _byte(block, 128 + i // 128 * 32 + i % 32) >> i // 32 % 4 * 2 & 3
        scale = _signed(_byte(block, 192 + s)).to(tl.float32) * _half(block, 208)
        return ((low | high << 4) - 32).to(tl.float32) * scale
    if KIND == "iq4_xs":
        low = _byte(block, 4 + s // 2) >> s % 2 * 4 & 15
        high = _byte(block, 2 + s // 4) >> s % 4 * 2 & 3
        scale = ((low | high << 4) - 32).to(tl.float32) * _half(block, 0)
        return _iq4(_byte(block, 8 + s * 16 + i % 16) >> i // 16 % 2 * 4 & 15) * scale
    if KIND == "q2_k":
        code = _byte(block, 16 + i // 128 * 32 + i % 32) >> i // 32 % 4 * 2 & 3
        both = _byte(block, s)
        scale = (both & 15).to(tl.float32) * _half(block, 80)
        return code.to(tl.float32) * scale - (both >> 4).to(tl.float32) * _half(block, 82)
    if KIND == "q3_k":
        code = _byte(block, 32 + i // 128 * 32 + i % 32) >> i // 32 % 4 * 2 & 3
        code += (_byte(block, i % 32) >> i // 32 & 1) * 4 - 4
        low = _byte(block, 96 + s % 8) >> s // 8 * 4 & 15
        high = _byte(block, 104 + s % 4) >> s // 4 * 2 & 3
        return code.to(tl.float32) * (((low | high << 4) - 32).to(tl.float32) * _half(block, 108))
    FIFTH: tl.constexpr = KIND == "q5_k"
    first, second = _byte(block, 4 + s % 4), _byte(block, 8 + s % 4)
    both = _byte(block, 12 + s % 4)
    scale = tl.where(s < 4, first & 63, both & 15 | first >> 6 << 4).to(tl.float32)
    minimum = tl.where(s < 4, second & 63, both >> 4 | second >> 6 << 4).to(tl.float32)
    code = _byte(block, (48 if FIFTH else 16) + i // 64 * 32 + i % 32) >> s % 2 * 4 & 15
    if FIFTH:
        code |= (_byte(block, 16 + i % 32) >> s & 1) << 4
    return code.to(tl.float32) * (scale * _half(block, 0)) - minimum * _half(block, 2)


@triton.jit
def unpack_kernel(
    packed,
    out,
    number,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # (block, scale, value): a scale is read once for its values
    index = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None, None]
    scale = tl.arange(0, VALUES // WIDTH)[None, :, None]
    place = scale * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    block = packed + tl.minimum(index, number - 1) * BYTES
    values = _of_32(block, place, KIND) if VALUES == 32 else _of_256(block, scale, place, KIND)
    inside = (index < number) & (place < VALUES)
    tl.store(out + index * VALUES + place, values.to(out.dtype.element_ty), inside)


def sizes_of(kind: str, values: int, num_bytes: int) -> dict[str, int]:
    """Return the sizes of a block, and the number of blocks per program."""
    width = 16 if kind in ("q2_k", "q3_k", "q6_k") else 32
    return {"VALUES": values, "BYTES": num_bytes, "WIDTH": width, "BLOCKS": BLOCK // values}


def unpack(out: Tensor, blocks: Tensor, kind: str) -> Tensor:
    """Write the values (n, values of a block) of blocks (n, bytes) of a GGUF file's type."""
    number, values = out.shape
    sizes = sizes_of(kind, values, blocks.shape[1])
    grid = (triton.cdiv(number, sizes["BLOCKS"]),)
    # products and sums are rounded separately, as in llama.cpp
    unpack_kernel[grid](blocks, out, number, KIND=kind, **sizes, enable_fp_fusion=False)
    return out


@triton.jit
def unpack_4bit_kernel(
    codes,
    absmax,
    nested,
    levels_of_absmax,
    offset,
    levels,
    out,
    number,
    IS_NESTED: tl.constexpr,
    VALUES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = block < number
    scale = tl.load(absmax + block, inside, 0)
    if IS_NESTED:
        level = tl.load(levels_of_absmax + scale.to(tl.int32))
        scale = level * tl.load(nested + block // NESTED_BLOCK, inside, 0.0) + tl.load(offset)
    pair = tl.arange(0, VALUES // 2)[None, :]
    byte = tl.load(codes + block * (VALUES // 2) + pair, inside, 0).to(tl.int32)
    values = tl.interleave(tl.load(levels + (byte >> 4)), tl.load(levels + (byte & 15))) * scale
    place = block * VALUES + tl.arange(0, VALUES)[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), inside)


def unpack_4bit(
    out: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    levels: Tensor,
    nested_block: int,
    _kind: str = "",
) -> Tensor:
    """Write the values (n, values of a block) of codes (n / 2, 1) with their scales.

    Args:
        levels: The float32 values of the 16 codes for an absmax of 1.
        nested_block: Values of absmax per scale of its own.
    """
    number, values = out.shape
    sizes = {"VALUES": values, "NESTED_BLOCK": nested_block, "BLOCKS": BLOCK // values}
    is_nested = len(scales) > 1
    absmax, nested, levels_of_absmax, offset = scales if is_nested else (scales[0],) * 4
    # products and sums are rounded separately, as by bitsandbytes
    unpack_4bit_kernel[(triton.cdiv(number, BLOCK // values),)](
        codes,
        absmax,
        nested,
        levels_of_absmax,
        offset,
        levels,
        out,
        number,
        IS_NESTED=is_nested,
        **sizes,
        enable_fp_fusion=False,
    )
    return out
