"""The heap of pinned memory, as torch's caching host allocator keeps it.

Each block is a power of two; one that is freed is kept for the next of its size and never returned.
"""

import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch


@dataclass
class PinnedHeap:
    """Blocks of pinned memory of one machine.

    Attributes:
        limit: Bytes that the system pins at most; None without a limit.
        held: Bytes that are pinned now, free blocks among them.
        blocks: Size of each block in use, by the id of its storage.
        free: Number of free blocks, by size.
    """

    limit: int | None = None
    held: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    free: Counter[int] = field(default_factory=Counter)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Let a storage lie in pinned memory; raise what CUDA raises where it is refused."""
        key, size = id(storage), power_of_two(storage.nbytes())
        if key in self.blocks:
            return
        if self.free[size]:
            self.free[size] -= 1
        elif self.limit is not None and self.held + size > self.limit:
            raise torch.AcceleratorError("CUDA error: out of memory")
        else:
            self.held += size
        self.blocks[key] = size
        weakref.finalize(storage, self._give_back, key)

    def _give_back(self, key: int) -> None:
        self.free[self.blocks.pop(key)] += 1


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()
