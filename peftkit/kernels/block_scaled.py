"""Weights of pre-quantised checkpoints: codes, and a scale for each block of codes.

    W[o, i] = (value(code[o, i]) - zero[o, g]) * scale[o, g],   g = the block of (o, i)

int4, mxfp4 and nvfp4 pack two codes in a byte, the first one in the low bits. The zeros of int4 and
uint8 are stored, or 8 and 128; fp8 is e4m3. Scales of mxfp4 are e8m0 exponents. Scales of nvfp4 are
e4m3 values and one float32 for the tensor: a scalar multiplies them, a tensor with a dimension
divides them (two formats). Columns sorted by group have their original positions as well (GPTQ's
desc_act). Products are computed in float32 and rounded once.

Shapes: codes (..., out, in) or (..., out, in / 2), scales and zeros (..., R, G).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

KINDS = ("int4", "uint8", "fp8", "mxfp4", "nvfp4")
PAIRED = ("int4", "mxfp4", "nvfp4")
_WIDE = {2: torch.int32, 4: torch.int64}
"""Bytes of a value -> integer dtype that holds two values."""
TILE_SIZE = 1 << 17
"""Values that a CPU dequantises at a time."""
MAX_VALUES = 1 << 30
"""Maximum values per call of bitsandbytes, which counts in 32 bits; stacks of experts have more."""
PART_VALUES = 1 << 28
"""Values per call for larger tensors: each chunk is a copy in addition to the result."""
_BLOCKS = tuple(1 << power for power in range(12, 5, -1))
"""Values per scale that bitsandbytes' 8-bit kernel supports."""


def unpack_blocks(
    packed: Tensor,
    scales: Sequence[Tensor],
    kind: str,
    shape: Sequence[int],
    block: int,
    rows: int,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return the tensor (..., out, in) as new memory; if transposed, as (..., in, out).

    Args:
        shape: Shape of the tensor.
        block, rows: Columns and rows per scale; the last block may be smaller.
    """
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    scale, *rest = scales
    factor = rest.pop(0) if kind == "nvfp4" else None
    places = rest.pop() if rest and rest[-1].dim() == 1 else None
    zero = rest.pop() if rest else None
    scale = _scale(scale, kind, factor)
    values = None
    if kind == "fp8" or (kind == "uint8" and zero is None):
        values = _by_table(packed, scale, kind, shape, block, rows, dtype)
    if values is None:
        if rows > 1:
            scale = scale.repeat_interleave(rows, -2)[..., : shape[-2], :]
        values = _in_tiles(packed, scale, zero, kind, shape, block, dtype)
    if places is not None:
        values = values.index_select(-1, places)
    return values.mT if transposed else values


def _scale(scale: Tensor, kind: str, factor: Tensor | None) -> Tensor:
    if kind == "mxfp4":
        return exponents(scale)
    if factor is None:
        return scale.float()
    scale = scale.view(torch.float8_e4m3fn).float()
    return scale / factor if factor.dim() else scale * factor


def exponents(scale: Tensor) -> Tensor:
    """Return the values of e8m0 bytes, in float32."""
    power = scale.view(torch.uint8).int() - 127
    return torch.ldexp(torch.ones_like(power, dtype=torch.float32), power)


def _in_tiles(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    shape: Sequence[int],
    block: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return (codes - zeros) * scales; on a CPU in tiles of rows that fit its cache."""
    wide = dtype if dtype.itemsize in _WIDE else torch.float32
    middle = {"int4": 8, "uint8": 128}.get(kind, 0) if zero is None else 0
    pairs = _pairs(kind, middle, wide, packed.device) if kind in PAIRED else None
    out = packed.new_empty((math.prod(shape[:-1]), shape[-1]), dtype=wide)
    codes, scale = packed.flatten(0, -2), scale.expand(*shape[:-1], -1).flatten(0, -2)
    zeros = None if zero is None else zero.flatten(0, -2)
    is_real = type(packed) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    step = max(TILE_SIZE // shape[-1], 1) if is_real and packed.device.type == "cpu" else len(out)
    for at in range(0, len(out), step):
        part = slice(at, at + step)
        values = _values(codes[part], kind, middle, pairs, wide)
        if zeros is not None:
            _apply(torch.sub, values, zeros[part], block, values)
        _apply(torch.mul, values, scale[part], block, out[part])
    return out.to(dtype).view(*shape)


def _values(
    packed: Tensor, kind: str, middle: int, pairs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the values of codes (rows, ...), before stored zeros and scales.

    Args:
        middle: The integer that represents zero if no zeros are stored.
        pairs: For 4-bit kinds, the two values of each byte.
    """
    if pairs is not None:
        wide = pairs.view(_WIDE[dtype.itemsize]).flatten()
        return wide.index_select(0, packed.flatten().int()).view(dtype).view(len(packed), -1)
    if kind == "fp8":
        return packed.view(torch.float8_e4m3fn).to(dtype)
    return packed.to(dtype).sub_(middle)


def _pairs(kind: str, middle: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two values of every byte: (256, 2)."""
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    codes = torch.stack([byte & 15, byte >> 4], 1)
    if kind == "int4":
        return codes.to(dtype).sub_(middle)
    bits = (codes & 8) << 4 | (codes & 7) << 2  # e2m1 as e4m3, except for the bias
    return bits.view(torch.float8_e4m3fn).float().mul_(64).to(dtype)


def _apply(
    operation: Callable[..., Tensor], values: Tensor, numbers: Tensor, block: int, out: Tensor
) -> None:
    """Apply an operation to values and the number of their block of columns, into `out`."""
    width = values.shape[-1]
    if numbers.shape[-1] * block == width:
        values, out = values.unflatten(-1, (-1, block)), out.unflatten(-1, (-1, block))
        numbers = numbers[..., None]
    else:
        numbers = numbers.repeat_interleave(block, -1)[..., :width]
    operation(values, numbers, out=out)  # rounded once: no float32 is written in between


def _by_table(
    packed: Tensor,
    scale: Tensor,
    kind: str,
    shape: Sequence[int],
    block: int,
    rows: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return 8-bit codes times scales by bitsandbytes' kernel; None if they are unsupported."""
    width = shape[-1]
    step = next((b for b in _BLOCKS if min(block, width) % b == 0 and width % b == 0), None)
    if step is None or dtype == torch.float64:
        return None
    scale = scale.repeat_interleave(min(block, width) // step, -1)[..., : width // step]
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)
    scale = scale[..., : shape[-2], :].expand(*shape[:-1], -1)
    byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    table = byte.view(torch.float8_e4m3fn).float() if kind == "fp8" else byte.float() - 128
    codes, scale = packed.view(torch.uint8), scale.reshape(-1)
    dequantize = torch.ops.bitsandbytes.dequantize_blockwise
    if codes.numel() <= MAX_VALUES:
        all_values: Tensor = dequantize(codes, scale, table, step, dtype)
        return all_values
    values = torch.empty(codes.shape, dtype=dtype, device=packed.device)
    flat, codes = values.view(-1), codes.view(-1)
    for start in range(0, len(codes), PART_VALUES):
        stop = start + PART_VALUES
        scales = scale[start // step : stop // step]
        flat[start:stop] = dequantize(codes[start:stop], scales, table, step, dtype)
    return values
