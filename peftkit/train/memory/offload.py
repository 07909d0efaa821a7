"""Recomputed blocks whose inputs wait in main memory: what is left on the device is one block.

While the forward pass goes on, each block's input is copied into pinned memory on a stream of its
own; in the backward pass the input of the block before is fetched while one block is computed
again. Two inputs at most are on the device: in the forward pass the last ones, whose copies may
not have been made yet, in the backward pass those in two buffers that are filled in turn. The
host runs ahead of the device: were tensors freed as soon as it has passed them and marked by
`record_stream`, all of them would be held until the device has come as far. On a CPU the same is
done by plain copies.

Shapes: a block's hidden states are (..., T, H), whatever stands before.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


ON_DEVICE = 2
"""Inputs: one is in use, one on its way."""


class Offload:
    """Computes blocks as `torch.utils.checkpoint.checkpoint` does, their inputs kept elsewhere."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane] = {}
        self._last: Callable[[], OffloadedInput | None] = lambda: None

    def __call__(self, run: Callable[..., Any], *args: Any, preserve_rng: bool = True) -> Any:
        """Return run(*args), to be computed again in the backward pass.

        Args:
            args: The hidden states and what else a block takes. Only the former are moved away: the
                rest is shared by all blocks.
            preserve_rng: Compute it again with the random numbers of the first time.
        """
        hidden, *others = args
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng}
        if not (isinstance(hidden, Tensor) and torch.is_grad_enabled()):
            return checkpoint(run, *args, **how)
        parcel = OffloadedInput(hidden, self._lane(hidden.device), self._last)
        self._last = weakref.ref(parcel)

        def again(_: Tensor, *rest: Any) -> Any:
            return run(parcel.take(), *rest)

        # the empty tensor tells torch on which device the generator is to be set back
        out = checkpoint(again, hidden.new_empty(0), *others, **how)
        parcel.live = None
        return out

    def _lane(self, device: torch.device) -> Lane | None:
        if device.type != "cuda":
            return None
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]


class Lane:
    """A device's way to main memory and back: a stream, pinned memory, two buffers to return to."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.space = device, PinnedSpace()
        self._stream = torch.cuda.Stream(device)
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._buffers: list[Tensor | None] = [None] * ON_DEVICE
        self._turn = 0

    def send(self, hidden: Tensor) -> Any:
        """Begin to copy a tensor away; return the range where it will be."""
        # what was sent before the last one is gone by now, or the device waits until it is: its
        # memory is then free on the stream that it came from, in that stream's order
        while len(self._leaving) >= ON_DEVICE:
            self._let_go()
        flat = as_bytes(hidden)
        taken = self.space.take(len(flat))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            taken.store(flat)
            self._leaving.append((flat, self._stream.record_event()))
        return taken

    def fetch(self, kept: Any) -> tuple[Tensor, torch.cuda.Event]:
        """Begin to copy a range back; return the bytes, and what to wait for before they are read.

        They are valid until two more were fetched.
        """
        while self._leaving:
            self._let_go()
        size = kept.stop - kept.start
        self._turn = (self._turn + 1) % ON_DEVICE
        buffer = self._buffers[self._turn]
        current = torch.cuda.current_stream(self.device)
        if buffer is None or len(buffer) < size:
            current.wait_stream(self._stream)  # which may still fill the smaller one
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._buffers[self._turn] = buffer
        self._stream.wait_stream(current)  # which reads what was in this buffer before
        with torch.cuda.stream(self._stream):
            kept.fetch(buffer[:size])
            return buffer[:size], self._stream.record_event()

    def _let_go(self) -> None:
        _, sent = self._leaving.popleft()
        torch.cuda.current_stream(self.device).wait_event(sent)


class OffloadedInput:
    """One block's input on its way to main memory and back.

    Args:
        lane: The way; None on a CPU.
        before: Returns the parcel of the block before, if it is still there.

    Attributes:
        live: The input itself, while the forward pass is in the block.
    """

    def __init__(
        self,
        hidden: Tensor,
        lane: Lane | None,
        before: Callable[[], OffloadedInput | None],
    ) -> None:
        self.live: Tensor | None = hidden
        self._lane, self._before = lane, before
        self._needs_grad = hidden.requires_grad
        self._shape, self._dtype = hidden.shape, hidden.dtype
        self._fetched: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._kept = hidden.detach().clone() if lane is None else lane.send(hidden.detach())

    def take(self) -> Tensor:
        """Return the input: the live one at first, then one that was fetched."""
        if self.live is not None:
            return self.live
        self.fetch()
        taken, self._fetched = self._fetched, None
        assert taken is not None
        if self._lane is not None and self._arrived is not None:
            torch.cuda.current_stream(self._lane.device).wait_event(self._arrived)
        if (before := self._before()) is not None:
            before.fetch()
        return taken.requires_grad_(self._needs_grad)

    def fetch(self) -> None:
        """Begin to bring the input back, if that has not begun."""
        if self._fetched is not None or self.live is not None:
            return
        if self._lane is None:
            self._fetched = self._kept.clone()
            return
        flat, self._arrived = self._lane.fetch(self._kept)
        self._fetched = flat.view(self._dtype).view(self._shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes (N,), as a view of it where its memory is in one piece."""
    return tensor.contiguous().flatten().view(torch.uint8)
