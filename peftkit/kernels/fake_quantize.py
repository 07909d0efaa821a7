"""Quantisers of weights in torch: the values that a file would hold, and its bytes.

The GGUF types are bit-equal to the package gguf, which is bit-equal to llama.cpp without imatrix.
The int4 formats are symmetric with one bfloat16 scale per group, as vLLM reads them
(compressed-tensors, pack-quantized).

    q8_0                d = max|w| / 127            w ~ d q          q in -127..127
    q4_0, q5_0          d = (largest w) / -2^(b-1)  w ~ d (q - 2^(b-1))
    q4_1, q5_1          d = (max - min) / (2^b - 1) w ~ d q + min
    int4_32, int4_128   d = max|w| / 7              w ~ d q          q in -8..7

Codes are chosen with d in float32, and d is then rounded to 16 bits. Weights whose updates are
smaller than half of d stay on their codes.

Shapes: weights (..., out, in); blocks (n, g) float32, g values of a row; scale and offset (n, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Values quantised at a time: scratch memory is about six times as much in float32."""


class Coded(NamedTuple):
    """Blocks in codes: the values are scale * (codes - zero) + offset, with 16-bit scales.

    Attributes:
        codes: (n, g) float32, whole numbers of at least 0 if they are packed (`zero` subtracted).
    """

    codes: Tensor
    zero: int
    scale: Tensor
    offset: Tensor | None

    @property
    def values(self) -> Tensor:
        """The dequantised blocks (n, g), float32."""
        values = (self.codes - self.zero) * self.scale
        return values if self.offset is None else values + self.offset


def _half(x: Tensor) -> Tensor:
    return x.to(torch.float16).float()


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _symmetric_8(b: Tensor) -> Coded:
    d = b.abs().amax(1, keepdim=True) / 127
    x = b * _inverse(d)
    codes = torch.sign(x) * (x.abs() + 0.5).floor()  # rounds half away from zero
    return Coded(codes, 0, _half(d), None)


def _signed_scale(bits: int) -> Callable[[Tensor], Coded]:
    zero, highest = 1 << bits - 1, (1 << bits) - 1

    def quantize(b: Tensor) -> Coded:
        top = b.gather(1, b.abs().argmax(1, keepdim=True))
        d = top / -zero
        codes = (b * _inverse(d)).add_(zero + 0.5).trunc_().clamp_(0, highest)
        return Coded(codes, zero, _half(d), None)

    return quantize


def _with_minimum(bits: int) -> Callable[[Tensor], Coded]:
    highest = (1 << bits) - 1

    def quantize(b: Tensor) -> Coded:
        low, high = b.amin(1, keepdim=True), b.amax(1, keepdim=True)
        d = (high - low) / highest
        codes = ((b - low) * _inverse(d)).add_(0.5).trunc_().clamp_(0, highest)
        return Coded(codes, 0, _half(d), _half(low))

    return quantize


def _int4(b: Tensor) -> Coded:
    d = (b.abs().amax(1, keepdim=True) / 7).clamp_min(1e-12).to(torch.bfloat16).float()
    return Coded((b / d).round_().clamp_(-8, 7), 0, d, None)


class Format(NamedTuple):
    """A format of quantised weights.

    Attributes:
        group: Values of a block.
        bits: Bits of a code, and of a value with its share of scale and minimum.
        code: Quantises blocks (n, group).
    """

    group: int
    bits: float
    code: Callable[[Tensor], Coded]


FORMATS: dict[str, Format] = {
    "q8_0": Format(32, 8.5, _symmetric_8),
    "q4_0": Format(32, 4.5, _signed_scale(4)),
    "q4_1": Format(32, 5.0, _with_minimum(4)),
    "q5_0": Format(32, 5.5, _signed_scale(5)),
    "q5_1": Format(32, 6.0, _with_minimum(5)),
    "int4_32": Format(32, 4.5, _int4),
    "int4_128": Format(128, 4.125, _int4),
}


def fake_quantized(weight: Tensor, kind: str) -> Tensor:
    """Return the values that a file of this format holds for a weight, in float32.

    Args:
        weight: (..., in), float32; rows of int4_128 may end with an incomplete group.
        kind: One of `FORMATS`; rows of other formats must be a multiple of the group.
    """
    group, _, code = FORMATS[kind]
    columns = weight.shape[-1]
    pad = -columns % group
    assert not pad or kind == "int4_128", (kind, columns)
    rows = weight.reshape(-1, columns)
    out = torch.empty_like(rows)
    step = max(CHUNK // columns, 1)
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        padded = torch.nn.functional.pad(some, (0, pad)) if pad else some
        values = code(padded.reshape(-1, group)).values.view(len(some), -1)
        out[at : at + step] = values[:, :columns]
    return out.view(weight.shape)


def gguf_rows(weight: Tensor, kind: str) -> Tensor:
    """Return the rows of a GGUF file: (rows, bytes of a row) of a weight (rows, in) in float32."""
    columns = weight.shape[-1]
    step = max(CHUNK // columns, 1)
    parts = (packed(FORMATS[kind].code(s.reshape(-1, 32)), kind) for s in weight.split(step))
    return torch.cat([part.view(-1, columns // 32 * part.shape[1]) for part in parts])


def packed(blocks: Coded, kind: str) -> Tensor:
    """Return the bytes of blocks in a GGUF type, (n, bytes of a block); layouts: ggml-common.h."""
    fields = [_bytes(blocks.scale)] + ([] if blocks.offset is None else [_bytes(blocks.offset)])
    if kind == "q8_0":
        return torch.cat([*fields, blocks.codes.to(torch.int8).view(torch.uint8)], 1)
    codes = blocks.codes.to(torch.uint8)
    if kind in ("q5_0", "q5_1"):  # the fifth bits of all codes, the first code lowest
        shift = torch.arange(8, dtype=torch.uint8)
        high = (codes >> 4).view(-1, 4, 8)
        fields.append((high << shift).sum(2, dtype=torch.uint8))
    low, upper = (codes & 15).chunk(2, 1)
    return torch.cat([*fields, low | upper << 4], 1)


def _bytes(scale: Tensor) -> Tensor:
    return scale.to(torch.float16).view(torch.uint8).view(-1, 2)


DAMP = 0.01
"""Added to the diagonal of X'X, relative to its mean: inputs that rarely occur."""
RANGES = {"q4_0": (0, 15), "q4_1": (0, 15), "int4_32": (-8, 7), "int4_128": (-8, 7)}
"""Lowest and highest code of the supported formats."""


def gptq(weight: Tensor, gram: Tensor, kind: str) -> Coded:
    """Return a weight in codes: (out * in / g, g), row by row.

    Args:
        weight: float32; its columns are a multiple of the format's group.
        kind: One of `RANGES`.
    """
    group, _, code = FORMATS[kind]
    low, high = RANGES[kind]
    weight, inverse = weight.clone(), _inverse_factor(gram)
    blocks = []
    for start in range(0, weight.shape[1], group):
        block = weight[:, start : start + group]
        grid = code(block)
        offset = torch.zeros_like(grid.scale) if grid.offset is None else grid.offset
        steps = torch.where(grid.scale == 0, 0.0, 1 / grid.scale)
        codes, errors = torch.empty_like(block), torch.empty_like(block)
        for i in range(group):
            column = block[:, i : i + 1]
            rounded = ((column - offset) * steps + grid.zero).round_().clamp_(low, high)
            value = (rounded - grid.zero) * grid.scale + offset
            error = (column - value) / inverse[start + i, start + i]
            codes[:, i], errors[:, i] = rounded[:, 0], error[:, 0]
            block[:, i:] -= error * inverse[start + i, start + i : start + group]
        weight[:, start + group :] -= errors @ inverse[start : start + group, start + group :]
        blocks.append(Coded(codes, grid.zero, grid.scale, grid.offset))
    codes = torch.stack([block.codes for block in blocks], 1).view(-1, group)
    scale = torch.stack([block.scale for block in blocks], 1).view(-1, 1)
    offsets = [block.offset for block in blocks if block.offset is not None]
    minimum = torch.stack(offsets, 1).view(-1, 1) if offsets else None
    return Coded(codes, blocks[0].zero, scale, minimum)


def _inverse_factor(gram: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of X'X, in float32."""
    hessian = gram.double()
    mean = hessian.diagonal().mean()
    hessian = hessian + torch.eye(len(hessian), dtype=torch.float64) * (DAMP * mean + 1e-8)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True).float()
