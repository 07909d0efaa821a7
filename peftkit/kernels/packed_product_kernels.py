"""Products of few rows with a packed weight in Triton: the unpacked weight is never stored.

    y = x W^T + b

A program unpacks a tile of W into registers, rounds it to x's dtype as unpacking does, and
multiplies it by up to four rows of x, with sums in float32. The functions for GGUF blocks are those
of the unpacking kernel (triton_kernels.py); the other formulas equal block_scaled.py, bit for bit.
If W has few rows, several programs share them, each with a part of the columns, and a second kernel
adds their sums. The order of sums is fixed, so results are deterministic.

Shapes: x (tokens, in), W (out, in), y (tokens, out).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit.kernels.block_scaled import PAIRED
from peftkit.kernels.gguf_blocks import TYPES
from peftkit.kernels.triton_kernels import _of_32, _of_256, _signed, sizes_of

DEPTH = 256
"""Columns of W that a program unpacks at a time: the largest block of a GGUF file."""
SUMS = 8
"""Rows of W times rows of x of a program, whose sums fit its threads' registers."""
MOST_TOKENS = 4
"""Rows of x per program: each unpacked value is used so often."""
PROGRAMS = 1024
"""Programs that keep the memory of a large card busy: eight for each of 132 multiprocessors."""
SUM_SIZE = 1024
"""Values per program of the sum."""


@triton.jit
def _e4m3(byte):
    """Return e4m3 values: their fields are placed in float32's, whose bias is larger by 120."""
    bits = (byte & 128) << 24 | (byte & 127) << 20
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(byte & 127 == 127, float("nan"), value)


@triton.jit
def _e2m1(code):
    """Return e2m1 values, likewise: the biases differ by 126."""
    bits = (code & 8) << 28 | (code & 7) << 22
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _e8m0(byte):
    bits = tl.where(byte == 0, 1 << 22, byte << 23)  # the first one is subnormal
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _blocks_tile(
    packed,
    row,
    start,
    width,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return a tile of GGUF blocks; past the last column it repeats the last block."""
    group = tl.arange(0, DEPTH // WIDTH)[None, :, None]
    i = tl.arange(0, WIDTH)[None, None, :]
    number = width // VALUES
    block = packed + row.to(tl.int64) * number * BYTES
    if VALUES == 32:
        return _of_32(block + tl.minimum(start // 32 + group, number - 1) * BYTES, i, KIND)
    return _of_256(block + start // 256 * BYTES, group, group * WIDTH + i, KIND)


@triton.jit
def _codes_tile(
    packed,
    scales,
    zeros,
    factor,
    row,
    start,
    width,
    block,
    height,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return a tile of codes times scales; past the last column it is zero."""
    first = start + tl.arange(0, DEPTH // WIDTH)[None, :, None] * WIDTH
    column = first + tl.arange(0, WIDTH)[None, None, :]
    at = row.to(tl.int64) * (width // 2 if PAIRS else width) + (column // 2 if PAIRS else column)
    code = tl.load(packed + at, column < width, 0).to(tl.int32) & 255
    if PAIRS:
        code = code >> column % 2 * 4 & 15
    at = (row // height).to(tl.int64) * tl.cdiv(width, block) + first // block
    scale = tl.load(scales + at, first < width, 0)
    if KIND == "mxfp4":
        return _e2m1(code) * _e8m0(scale.to(tl.int32))
    if KIND == "nvfp4":
        by = tl.load(factor)
        scale = _e4m3(scale.to(tl.int32))
        scale = tl.div_rn(scale, by) if FACTOR == "divides" else scale * by
        return _e2m1(code) * scale
    scale = scale.to(tl.float32)
    if KIND == "fp8":
        return _e4m3(code) * scale
    if KIND == "int8":
        return _signed(code).to(tl.float32) * scale
    zero = 8 if PAIRS else 128
    if zeros is not None:
        zero = tl.load(zeros + at, first < width, 0).to(tl.int32)
    return (code - zero).to(tl.float32) * scale


@triton.jit
def product_kernel(
    x,
    packed,
    scales,
    zeros,
    factor,
    bias,
    out,
    tokens,
    rows,
    width,
    block,
    height,
    parts,
    part_width,
    KIND: tl.constexpr,
    VALUES: tl.constexpr,
    BYTES: tl.constexpr,
    PAIRS: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEIGHT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # programs for the same rows of W are neighbours, which find them in the cache
    groups = tl.cdiv(tokens, TOKENS)
    group, rest = tl.program_id(0) % groups, tl.program_id(0) // groups
    part, first = rest % parts, rest // parts * HEIGHT
    # (token, row, scale, column): a scale is read once for its values, and so is x for all rows
    token = group * TOKENS + tl.arange(0, TOKENS)
    row = first + tl.arange(0, HEIGHT)
    known = tl.minimum(row, rows - 1)[:, None, None]
    place = tl.arange(0, DEPTH // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    place = place[None, None, :, :]
    is_token = (token < tokens)[:, None, None, None]
    x_row = x + token[:, None, None, None] * width
    total = tl.zeros((TOKENS, HEIGHT, DEPTH // WIDTH, WIDTH), tl.float32)
    for start in range(part * part_width, tl.minimum((part + 1) * part_width, width), DEPTH):
        if VALUES > 0:
            w = _blocks_tile(packed, known, start, width, KIND, VALUES, BYTES, WIDTH, DEPTH)
        else:
            w = _codes_tile(
                packed, scales, zeros, factor, known, start, width, block, height,
                KIND, PAIRS, FACTOR, WIDTH, DEPTH,
            )  # fmt: skip
        column = start + place
        values = tl.load(x_row + column, is_token & (column < width), 0.0).to(tl.float32)
        w = w.to(x.dtype.element_ty).to(tl.float32)  # as it is when it is unpacked
        total = tl.fma(values, w[None, :, :, :], total)
    sums = tl.sum(tl.sum(total, 3), 2)
    inside = (token < tokens)[:, None] & (row < rows)[None, :]
    if bias is not None:
        limit = tl.where(part == 0, rows, 0)  # the first part alone adds the bias
        sums += tl.load(bias + row, row < limit, 0.0).to(tl.float32)[None, :]
    at = (part * tokens + token[:, None]).to(tl.int64) * rows + row[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), inside)


@triton.jit
def sum_kernel(sums, out, number, parts, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = place < number
    total = tl.load(sums + place, inside, 0.0)
    for part in range(1, parts):
        total += tl.load(sums + part * number + place, inside, 0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


def constants(
    kind: str, width: int, block: int, tokens: int, factor: Tensor | None = None
) -> dict[str, Any]:
    """Return the sizes that a kernel is compiled for."""
    at_once = min(triton.next_power_of_2(tokens), MOST_TOKENS)
    sizes: dict[str, Any] = {"TOKENS": at_once, "HEIGHT": SUMS // at_once, "DEPTH": DEPTH}
    if kind in TYPES:
        sizes |= sizes_of(kind, TYPES[kind].values, TYPES[kind].num_bytes)
        del sizes["BLOCKS"]
    else:
        per_scale = 32 if block >= width or block % 32 == 0 else 16
        sizes |= {"VALUES": 0, "BYTES": 0, "WIDTH": per_scale}
    by = "" if factor is None else "divides" if factor.dim() else "multiplies"
    return {**sizes, "KIND": kind, "PAIRS": kind in PAIRED, "FACTOR": by}


def parts_of(programs: int, width: int) -> tuple[int, int]:
    """Return the number of programs that share rows of W, and the columns of each."""
    chunks = triton.cdiv(width, DEPTH)
    each = max(chunks * programs // PROGRAMS, 1)
    return triton.cdiv(chunks, each), each * DEPTH


def multiply(
    x: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    kind: str,
    shape: Sequence[int],
    block: int,
    height: int,
    bias: Tensor | None,
) -> Tensor:
    """Return y (tokens, out) of contiguous tensors.

    Args:
        scales: As `unpack_blocks` takes them; none of GGUF blocks.
        block, height: Columns and rows per scale.
    """
    (rows, width), tokens = shape, len(x)
    rest = list(scales)
    scale = rest.pop(0) if rest else None
    factor = rest.pop(0) if kind == "nvfp4" else None
    if rest and rest[-1].dim() == 1:  # columns are sorted by group: so are those of x
        x = torch.empty_like(x).index_copy_(1, rest.pop().long(), x)
    zeros = rest.pop() if rest else None
    if scale is not None and scale.dtype.itemsize == 1:
        scale = scale.view(torch.uint8)
    block = width if kind == "int8" else block
    sizes = constants(kind, width, block, tokens, factor)
    programs = triton.cdiv(rows, sizes["HEIGHT"]) * triton.cdiv(tokens, sizes["TOKENS"])
    parts, part_width = parts_of(programs, width)
    out = x.new_empty(tokens, rows)
    sums = out if parts == 1 else x.new_empty(parts, tokens, rows, dtype=torch.float32)
    pointers = (x, packed, scale, zeros, factor, bias, sums)
    numbers = (tokens, rows, width, block, height, parts, part_width)
    # products and sums that unpack are rounded separately, as in llama.cpp
    product_kernel[(programs * parts,)](*pointers, *numbers, **sizes, enable_fp_fusion=False)
    if parts > 1:
        number = out.numel()
        sum_kernel[(triton.cdiv(number, SUM_SIZE),)](sums, out, number, parts, SIZE=SUM_SIZE)
    return out
