"""Tensors in ggml's types: to float32 and back, and how far rounding to a type may go.

The types' blocks are the gguf library's business; a row is a whole number of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from peftkit.errors import AdapterError
from peftkit.formats.gguf.header import GGUFTensor, Kinds

PACKED = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""Types that a changed tensor can be packed in. Others, such as the K-quants, are only read."""

_FLOATS = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8}
"""Relative error of one number."""
_STEPS = {"Q8_0": 254, "Q5_1": 31, "Q5_0": 32, "Q4_1": 15, "Q4_0": 16}
"""Steps from a block's lowest number to its largest (_1), or of the largest to both sides (_0)."""
BLOCK = 32


def all_kinds() -> Kinds:
    """Return every type that the gguf library knows: number to name, and its block's sizes."""
    import gguf

    return {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


def read_bytes(path: Path, file: BinaryIO, entry: GGUFTensor) -> Tensor:
    """Return the bytes of a tensor of a checked header: uint8 of shape (num_bytes,).

    Raises:
        AdapterError: The file became shorter.
    """
    data = torch.empty(entry.num_bytes, dtype=torch.uint8)
    file.seek(entry.start)
    if file.readinto(data.numpy().data) != entry.num_bytes:  # type: ignore[attr-defined]
        raise AdapterError(f"cannot read {path}", found="It became shorter while it was read.")
    return data


def unpack(data: Tensor, entry: GGUFTensor) -> Tensor:
    """Return the values of a tensor's bytes in float32.

    Raises:
        AdapterError: The gguf library cannot read its type.
    """
    import gguf

    kind = gguf.GGMLQuantizationType(entry.kind)
    rows = data.view(entry.num_values // entry.shape[-1], -1)
    try:
        values = gguf.quants.dequantize(rows.numpy(), kind)
    except NotImplementedError:
        raise AdapterError(
            f"cannot read tensors of the type {kind.name}",
            found="The installed package gguf has no code for it.",
            fix="pip install -U gguf",
        ) from None
    return torch.from_numpy(values).reshape(entry.shape)


def pack(values: Tensor, name: str) -> Tensor:
    """Return the bytes of a float32 tensor in one of the types PACKED: uint8 of one dimension."""
    import gguf

    packed = gguf.quants.quantize(values.contiguous().numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(packed.reshape(-1).view("uint8"))


def dithered(values: Tensor, name: str, seed: int) -> Tensor:
    """Return values that lose nothing in the mean when they are rounded to a type.

    A weight that comes out of a block stands on one of its steps, and an update of less than half a
    step would be rounded away. With noise of one step's width, the chance to go on to the next step
    is the share of it that the update makes. What sets a block's scale is left as it is.
    """
    if name not in _STEPS:
        return values
    blocks = values.reshape(-1, BLOCK)
    low, high = _span(blocks, name)
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(seed)).sub_(0.5)
    first = (blocks == high) | (blocks == low)
    moved = blocks + noise.mul_((high - low) / _STEPS[name]).masked_fill_(first, 0.0)
    return moved.clamp_(low, high).reshape(values.shape)


def _span(blocks: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return between which numbers a type's steps divide each block: (blocks, 1)."""
    if name.endswith("_1"):
        return blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    largest = blocks.abs().amax(1, keepdim=True)
    return -largest, largest


def is_rounded(values: Tensor, stored: Tensor, name: str) -> bool:
    """Tell whether stored values are those asked for, but for the rounding of a type.

    No number of a block may be off by more than one of the block's steps, and what rounding the
    block's own float16 scale adds to that.
    """
    error = (stored - values).abs()
    if name in _FLOATS:
        return bool((error <= _FLOATS[name] * values.abs() + 2.0**-25).all())
    blocks, error = values.reshape(-1, BLOCK), error.reshape(-1, BLOCK)
    low, high = _span(blocks, name)
    # float16: 11 bits of a scale, and absolutely 2^-25 of a tiny one, times the steps
    allowed = (high - low) / _STEPS[name] + blocks.abs().amax(1, keepdim=True) * 2.0**-9
    return bool((error <= allowed + 2.0**-25 * 127).all())
