"""Pinned main memory for what waits there from a forward to a backward pass: taken once, kept.

torch's own pinned allocator rounds each tensor up to a power of two, which for a model's hidden
states can be half as much again. Here they lie one after the other in chunks that are such powers.
Space is given back in the reverse order in which it was taken, as a backward pass does.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_CHUNK, LARGEST_CHUNK = 1 << 20, 1 << 26
"""Bytes; each chunk is twice as large as the one before, up to the largest."""


class PinnedSpace:
    """A stack of bytes over chunks of pinned memory.

    Copies out of and into one space must all be made on one stream: its order alone keeps a range
    from being overwritten while it is still read.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._top = self._num_taken = 0

    @property
    def num_bytes(self) -> int:
        """How much is held, in use or not."""
        return sum(map(len, self._chunks))

    def take(self, num_bytes: int) -> PinnedRange:
        """Return a range that is free; more memory is pinned if need be."""
        start, stop = self._top, self._top + num_bytes
        while self.num_bytes < stop:
            size = len(self._chunks[-1]) * 2 if self._chunks else FIRST_CHUNK
            size = min(size, LARGEST_CHUNK)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._top, self._num_taken = stop, self._num_taken + 1
        return PinnedRange(self, start, stop)

    def give_back(self, given: PinnedRange) -> None:
        """Let a range be taken again."""
        self._num_taken -= 1
        if self._num_taken == 0:
            self._top = 0
        elif given.stop == self._top:
            self._top = given.start

    def pieces(self, start: int, stop: int) -> list[Tensor]:
        """Return the bytes of a range, one tensor for each chunk that it touches."""
        found, begin = [], 0
        for chunk in self._chunks:
            end = begin + len(chunk)
            if begin < stop and start < end:
                found.append(chunk[max(start - begin, 0) : stop - begin])
            begin = end
        return found


class PinnedRange:
    """Some bytes of a space, until it is let go of."""

    def __init__(self, space: PinnedSpace, start: int, stop: int) -> None:
        self._space, self.start, self.stop = space, start, stop

    def __del__(self) -> None:
        self._space.give_back(self)

    def store(self, source: Tensor) -> None:
        """Begin to copy bytes (N,) of a device into it."""
        pieces = self._space.pieces(self.start, self.stop)
        for piece, part in zip(pieces, source.split([*map(len, pieces)]), strict=True):
            piece.copy_(part, non_blocking=True)

    def fetch(self, target: Tensor) -> None:
        """Begin to copy it into bytes (N,) of a device."""
        pieces = self._space.pieces(self.start, self.stop)
        for piece, part in zip(pieces, target.split([*map(len, pieces)]), strict=True):
            part.copy_(piece, non_blocking=True)
