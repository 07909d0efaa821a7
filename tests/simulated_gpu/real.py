"""The suite of the simulated card on a real one: PEFTKIT_REAL_CARD=1 pytest tests/simulated_gpu.

What only a simulation knows (waits, launches, other cards than the one that is here) is skipped.
"""

import gc
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

REAL = os.environ.get("PEFTKIT_REAL_CARD") == "1"
ONLY_SIMULATED = (
    *(".waits", ".launches", ".recorded_streams", ".operators", ".pinned", ".retries", ".current"),
    *("capability=", "count=", "memory_format", "launch("),
)
"""Words in a test that asks for what only a simulation knows."""
FILES = ("test_waits", "test_simulation", "test_ranks")


def needs_simulation(item: Any) -> bool:
    """Tell whether a test asks for what only a simulation knows."""
    source = inspect.getsource(item.function)
    return item.module.__name__.rpartition(".")[2] in FILES or any(
        word in source for word in ONLY_SIMULATED
    )


class RealCard:
    """What tests ask a card, answered by torch."""

    def __init__(self, memory: int) -> None:
        self._memory = memory

    @property
    def memory(self) -> int:
        """What may be taken of it."""
        return self._memory

    @memory.setter
    def memory(self, value: int) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(value / total, 1.0))
        self._memory = value

    @property
    def allocated(self) -> int:
        """Bytes now."""
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        """Bytes at most since `reset`."""
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        """Begin to count anew."""
        torch.cuda.reset_peak_memory_stats()

    def settle(self) -> None:
        """Wait for what was launched."""
        torch.cuda.synchronize()


@contextmanager
def real_card(memory: int | None = None) -> Iterator[RealCard]:
    """Give the first card that is here, capped if so asked; leave it as it was."""
    total = torch.cuda.get_device_properties(0).total_memory
    card = RealCard(total)
    if memory is not None and memory < total:
        card.memory = memory
    card.reset()
    try:
        yield card
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        card.memory = total
