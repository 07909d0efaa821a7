"""How a base is held in memory, and what is made of its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """How a base is held in memory.

    Attributes:
        quantize: "none", "nf4", "fp4" or "int8".
        double_quant: Quantise the scales of nf4 and fp4 as well.
        dtype: Of all computing and of what is not packed.
        device: Where it is.
        quantize_towers: Pack what stands beside a language model too.
    """

    quantize: str
    double_quant: bool
    dtype: torch.dtype
    device: torch.device
    quantize_towers: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A frozen model in eval mode.

    Attributes:
        fingerprint: Of config and weights as they were before packing.
        head: Paths of the modules of its head, if it was loaded for one.
    """

    model: Any
    fingerprint: str
    head: tuple[str, ...]
