"""The speed of GPUs by name, and of this machine, measured."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from peftkit.errors import ConfigError
from peftkit.kernels.device import gpu_here

PRODUCT_SHARE = 0.4
"""Of the peak rate a step reaches, as the best published LoRA runs do."""
BANDWIDTH_SHARE = 0.85
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1 << (10 * n) for n, unit in enumerate("KMGT", 1)}


LINK = 16.0
"""GB/s from main memory to a GPU: PCIe 4.0 x16 in practice is a little under it."""
WIRES = (25.0, 3.0)
"""GB/s between GPUs: of one machine, over PCIe; of several, over 25 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: dense bf16 TFLOP/s with fp32 sums, GB/s and GB of its memory, as its maker says."""

    name: str
    tflops: float
    gigabytes_per_second: float
    gigabytes: int

    @property
    def rate(self) -> float:
        """FLOP/s that a step reaches."""
        return PRODUCT_SHARE * self.tflops * 1e12

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Return the time of a step: by its FLOPs, or by the bytes that it reads."""
        by_flops = flops / self.rate
        return max(by_flops, num_bytes / (BANDWIDTH_SHARE * self.gigabytes_per_second * 1e9))


CARDS = (
    Card("RTX 3060", 25, 360, 12),
    Card("RTX 4060 Ti", 44, 288, 16),
    Card("RTX 4090", 165, 1008, 24),
    Card("A100", 312, 2039, 80),
    Card("H100", 989, 3350, 80),
    Card("H200", 989, 4800, 141),
)


MOMENT = 0.5
"""Seconds that measuring may take, about."""


def parse_size(text: str) -> int:
    """Return the bytes that a text like 8GB, 12 GiB or 16 means; a bare number is in GB.

    Raises:
        ConfigError: It is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?(B?)\s*", text, re.IGNORECASE)
    value = float(match[1]) if match else 0.0
    if match is None or value <= 0 or (match[3] and not match[2]):
        raise ConfigError(
            f"--memory {text!r} is no size.",
            found="Expected a number of GB above zero.",
            fix="Write it as 8GB, 24GB or 7.5GiB.",
        )
    return int(value * _UNITS[(match[2] or "G").upper()])


def card_of(memory: int) -> Card:
    """Return the named GPU that has so much memory: the smallest, or else the largest."""
    return next((card for card in CARDS if card.gigabytes * 1e9 >= 0.95 * memory), CARDS[-1])


def measured_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of matrices on this machine, measured for a moment."""
    here = gpu_here()
    device, size = (here[0], 4096) if here else (torch.device("cpu"), 512)
    wait = torch.get_device_module(device).synchronize if here else lambda: None
    a = torch.ones(size, size, dtype=dtype, device=device)
    best, until = float("inf"), time.perf_counter() + MOMENT
    for done in range(4):  # the first one makes its kernel
        if done > 1 and time.perf_counter() > until:
            break  # of a dtype that the machine is slow at
        wait()
        began = time.perf_counter()
        a @ a
        wait()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
