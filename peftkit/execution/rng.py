"""Seed, capture and restore the random number generators of a process, as plain tensors."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from peftkit.kernels.device import gpu_of

State = dict[str, Tensor]


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed python, numpy and torch; ranks get different seeds, since dropout masks must differ."""
    seed = (seed + 1_000_003 * rank) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def capture(device: torch.device) -> State:
    """Return the state of all generators; names, shapes and dtypes are equal on all processes."""
    version, words, gauss = random.getstate()
    python = [version, *words, gauss is not None, _bits(gauss or 0.0)]
    # numpy types its legacy state too loosely for mypy
    _, keys, position, has_gauss, cached = cast(
        "tuple[str, Any, int, int, float]", np.random.get_state(legacy=True)
    )
    state = {
        "python": torch.tensor(python, dtype=torch.int64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, _bits(cached)]),
        "torch": torch.get_rng_state(),
    }
    if (gpu := gpu_of(device)) is not None:
        state[device.type] = gpu.get_rng(device)
    return state


def restore(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Set all generators to a captured state."""
    version, *words, has_gauss, bits = state["python"].tolist()
    random.setstate((version, tuple(words), _float(bits) if has_gauss else None))
    *keys, position, has_gauss, bits = state["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _float(bits))
    )
    torch.set_rng_state(state["torch"])
    if (gpu := gpu_of(device)) is not None and device.type in state:
        gpu.set_rng(state[device.type], device)


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the generators and the model's buffers (running means) on exit."""
    before = capture(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        restore(before, device)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def seed_of(*numbers: int) -> int:
    """Derive a seed from numbers."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _bits(value: float) -> int:
    """Return the bits of a float as an int64, which keeps its exact value."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
