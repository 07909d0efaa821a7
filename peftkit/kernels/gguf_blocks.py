"""Weights of GGUF files: rows of quantised blocks, dequantised without repacking.

A block holds a float16 scale (and minimum) next to its codes; a block of the K types has 8 or 16
sub-blocks, whose scales are in 4 to 8 bits. A row is a whole number of blocks, so rows can be
permuted, cut and looked up as bytes. Values are computed in float32, bit-equal to llama.cpp's, and
rounded once. Layouts: ggml-common.h of llama.cpp.

Shapes: packed (..., rows, bytes of a row); n blocks; `out` is (n, values of a block).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 1 << 17
"""Values that a CPU dequantises at a time, to keep intermediate values in its cache."""
DEVICE_PIECE = 1 << 22
"""Values that a GPU without Triton dequantises at a time: 60 MB of scratch memory at most."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block, in float32: (n, 1)."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(codes: Tensor, out: Tensor) -> None:
    """Write the low four bits of bytes (n, g, w), then the high ones: out (n, g, 2, w)."""
    torch.bitwise_and(codes, 15, out=out[:, :, 0])
    torch.bitwise_right_shift(codes, 4, out=out[:, :, 1])


def _nibbles_of(blocks: Tensor, at: int, groups: int, width: int) -> Tensor:
    """Return the codes of groups of bytes, in their order: (n, g, 2, w)."""
    codes = blocks[:, at : at + groups * width].unflatten(1, (groups, width))
    nibbles = codes.new_empty(len(blocks), groups, 2, width)
    _nibbles(codes, nibbles)
    return nibbles


def _bits(blocks: Tensor, at: int) -> Tensor:
    """Return the 32 bits from byte `at`, as 16 or 0: (n, 32)."""
    shift = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> shift & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    codes = _nibbles_of(blocks, 2, 1, 16).flatten(1).view(torch.int8).sub_(8)
    torch.mul(codes, _half(blocks, 0), out=out)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    codes = _nibbles_of(blocks, 4, 1, 16).flatten(1)
    torch.add(torch.mul(codes, _half(blocks, 0)), _half(blocks, 2), out=out)


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    codes = _nibbles_of(blocks, 6, 1, 16).flatten(1).bitwise_or_(_bits(blocks, 2))
    torch.mul(codes.view(torch.int8).sub_(16), _half(blocks, 0), out=out)


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    codes = _nibbles_of(blocks, 8, 1, 16).flatten(1).bitwise_or_(_bits(blocks, 4))
    torch.add(torch.mul(codes, _half(blocks, 0)), _half(blocks, 2), out=out)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    levels = torch.tensor(IQ4, dtype=torch.float32, device=blocks.device)
    codes = _nibbles_of(blocks, 2, 1, 16).flatten(1)
    torch.mul(_looked_up(levels, codes), _half(blocks, 0), out=out)


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    levels = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    codes = _nibbles_of(blocks, 1, 1, 16).flatten(1)
    power = blocks[:, :1].int() - 128  # 128, not 127: the levels are doubled
    scale = torch.ldexp(torch.ones_like(power, dtype=torch.float32), power)
    torch.mul(_looked_up(levels, codes), scale, out=out)


def _looked_up(levels: Tensor, codes: Tensor) -> Tensor:
    return levels.index_select(0, codes.flatten().int()).view(codes.shape)


def _six_bits(blocks: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima of 6 bits each, as Q4_K and Q5_K pack them: (n, 8)."""
    low, low_minimum, both = blocks[:, at : at + 12].split(4, 1)
    scale = torch.cat([low & 63, both & 15 | low >> 6 << 4], 1)
    minimum = torch.cat([low_minimum & 63, both >> 4 | low_minimum >> 6 << 4], 1)
    return scale.float(), minimum.float()


def _scaled_less_minimum(blocks: Tensor, codes: Tensor, out: Tensor) -> None:
    """Write (d s) code - (dmin m) of codes (n, 8, 32)."""
    scale, minimum = _six_bits(blocks, 4)
    scale.mul_(_half(blocks, 0))
    minimum.mul_(_half(blocks, 2))
    values = torch.mul(codes, scale[..., None])
    torch.sub(values, minimum[..., None], out=out.unflatten(1, (8, 32)))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _scaled_less_minimum(blocks, _nibbles_of(blocks, 16, 4, 32).flatten(1, 2), out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    codes = _nibbles_of(blocks, 48, 4, 32).flatten(1, 2)
    high = blocks[:, 16:48]
    for bit in range(8):
        moved = high << 4 - bit if bit < 5 else high >> bit - 4
        codes[:, bit].bitwise_or_(moved.bitwise_and_(16))
    _scaled_less_minimum(blocks, codes, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low, high = blocks[:, :128].unflatten(1, (2, 2, 32)), blocks[:, 128:192].unflatten(1, (2, 32))
    codes = low.new_empty(len(blocks), 2, 4, 32)
    torch.bitwise_and(low, 15, out=codes[:, :, :2])
    torch.bitwise_right_shift(low, 4, out=codes[:, :, 2:])
    for field in range(4):
        moved = high << 4 - 2 * field if field < 3 else high >> 2
        codes[:, :, field].bitwise_or_(moved.bitwise_and_(48))
    scale = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    values = codes.view(torch.int8).sub_(32).view(-1, 16, 16)
    torch.mul(values, scale[..., None], out=out.unflatten(1, (16, 16)))


def _two_bits(blocks: Tensor, at: int) -> Tensor:
    """Return 64 bytes' fields of two bits: (n, 2, 4, 32)."""
    codes = blocks[:, at : at + 64].unflatten(1, (2, 32))
    return torch.stack([codes >> 2 * field & 3 for field in range(4)], 2)


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    both = blocks[:, :16]
    scale = (both & 15).float().mul_(_half(blocks, 80))[..., None]
    minimum = (both >> 4).float().mul_(_half(blocks, 82))[..., None]
    values = torch.mul(_two_bits(blocks, 16).view(-1, 16, 16), scale)
    torch.sub(values, minimum, out=out.unflatten(1, (16, 16)))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    codes = _two_bits(blocks, 32)
    mask = blocks[:, :32]
    high = torch.stack([(mask >> bit & 1) << 2 for bit in range(8)], 1).view(-1, 2, 4, 32)
    values = codes.view(torch.int8) + high.view(torch.int8) - 4  # a set bit adds 4
    low, rest = blocks[:, 96:104], blocks[:, 104:108]
    scale = torch.cat([low & 15, low >> 4], 1)
    scale |= torch.cat([(rest >> 2 * field & 3) << 4 for field in range(4)], 1)
    scale = scale.view(torch.int8).sub_(32) * _half(blocks, 108)
    torch.mul(values.view(-1, 16, 16), scale[..., None], out=out.unflatten(1, (16, 16)))


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    levels = torch.tensor(IQ4, dtype=torch.float32, device=blocks.device)
    high = blocks[:, 2:4]  # eight fields of two bits
    low = _nibbles_of(blocks, 4, 4, 1).flatten(1)
    fields = torch.stack([(high >> 2 * field & 3) << 4 for field in range(4)], 2).flatten(1)
    scale = (low | fields).view(torch.int8).sub_(32) * _half(blocks, 0)
    codes = _nibbles_of(blocks, 8, 8, 16).flatten(2)
    torch.mul(_looked_up(levels, codes), scale[..., None], out=out.unflatten(1, (8, 32)))


class BlockType(NamedTuple):
    """A type of blocks.

    Attributes:
        number: Number of the type in ggml.
        values, num_bytes: Sizes of a block.
        write: Dequantises blocks (n, num_bytes) into (n, values).
    """

    number: int
    values: int
    num_bytes: int
    write: Callable[[Tensor, Tensor], None]


TYPES = {
    "q4_0": BlockType(2, 32, 18, _q4_0),
    "q4_1": BlockType(3, 32, 20, _q4_1),
    "q5_0": BlockType(6, 32, 22, _q5_0),
    "q5_1": BlockType(7, 32, 24, _q5_1),
    "q8_0": BlockType(8, 32, 34, _q8_0),
    "q2_k": BlockType(10, 256, 84, _q2_k),
    "q3_k": BlockType(11, 256, 110, _q3_k),
    "q4_k": BlockType(12, 256, 144, _q4_k),
    "q5_k": BlockType(13, 256, 176, _q5_k),
    "q6_k": BlockType(14, 256, 210, _q6_k),
    "iq4_nl": BlockType(20, 32, 18, _iq4_nl),
    "iq4_xs": BlockType(23, 256, 136, _iq4_xs),
    "mxfp4_gguf": BlockType(39, 32, 17, _mxfp4),
}
"""Block type by kind of a `PackedFormat`; mxfp4 has another layout than in other checkpoints."""


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of a row."""
    block = TYPES[kind]
    return columns // block.values * block.num_bytes


@torch.library.custom_op("peftkit_kernels::unpack_gguf", mutates_args=())
def unpack_gguf(packed: Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor (..., rows, columns) of packed rows (..., rows, bytes), in new memory.

    On a GPU one kernel reads blocks and writes values; with torch operations, 4-bit types move five
    times as much memory. It is a custom operator because torch.compile would break the graph at the
    slice assignments.
    """
    block = TYPES[kind]
    blocks = packed.detach().reshape(-1, block.num_bytes)
    unpacked = torch.empty(tuple(shape), dtype=dtype, device=packed.device)
    out = unpacked.view(-1, block.values)
    if packed.is_cuda:
        from peftkit.kernels.fused import TRITON  # other bases do not need it

        def first() -> Tensor:
            values = torch.empty_like(out[:256])
            block.write(blocks[:256], values)
            return values

        if TRITON.launch("unpack", out, blocks, kind, expected=first) is not None:
            return unpacked
    step = (PIECE if packed.device.type == "cpu" else DEVICE_PIECE) // block.values
    for at in range(0, len(blocks), step):
        block.write(blocks[at : at + step], out[at : at + step])
    return unpacked


@unpack_gguf.register_fake
def _like_unpacked(packed: Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(tuple(shape), dtype=dtype)
