"""Dequantised copies of packed weights, kept for speed if memory is plentiful."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from peftkit.kernels.device import free_bytes
from peftkit.quant.layers import Packing, packed_tensors

COPY_SHARE = 0.25
"""Maximum share of the free memory that `keep_copies` uses."""


@contextmanager
def copies_kept(model: nn.Module, share: float) -> Iterator[None]:
    """Keep unpacked copies of weights on a CPU within the context, for fast generation.

    Permanent copies stay.

    Args:
        share: Share of the free memory; as many weights are unpacked as fit.
    """
    candidates = [
        (packed, packing)
        for _, packed, packing in packed_tensors(model)
        if packing.unpacked is None and packed.device.type == "cpu"
    ]
    bytes_left = share * (free_bytes() or 0) if candidates else 0.0
    copied: list[Packing] = []
    try:
        for packed, packing in candidates:
            bytes_left -= packing.form.shape.numel() * packing.dtype.itemsize
            if bytes_left < 0:
                break
            packing.unpacked = packing(packed)
            copied.append(packing)
        yield
    finally:
        for packing in copied:
            packing.unpacked = None


def keep_copies(model: nn.Module, max_bytes: int | None = None) -> int:
    """Keep a dequantised copy of every quantised weight, or of none if not all of them fit.

    With copies a quantised base is as fast as an unquantised one.

    Args:
        max_bytes: By default a quarter (COPY_SHARE) of the free memory.

    Returns:
        Bytes of the copies.
    """
    if max_bytes is None:
        max_bytes = int(COPY_SHARE * (free_bytes() or 0))
    tensors = list(packed_tensors(model))
    total = sum(p.form.shape.numel() * p.dtype.itemsize for _, _, p in tensors)
    fits = total <= max_bytes
    for _, packed, packing in tensors:
        packing.unpacked = None
        packing.unpacked = packing(packed) if fits else None
    return total if fits else 0
