"""Recomputed blocks whose inputs wait in main memory: what is left on the device is one block.

While the forward pass goes on, each block's input is copied into pinned memory on a stream of its
own; in the backward pass the input of the block before is fetched while one block is computed
again. Two inputs at most are on the device: in the forward pass the last ones, whose copies may
not have been made yet, in the backward pass the one in use and the one on its way. The host runs
ahead of the device: were tensors freed as soon as it has passed them and marked by
`record_stream`, all of them would be held until the device has come as far. Pinned memory is kept
by torch's own allocator from step to step. On a CPU the same is done by plain copies.

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
    """A device's way to main memory and back: a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, hidden: Tensor) -> Tensor:
        """Begin to copy a tensor away; return where it will be, pinned."""
        # what was sent before the last one is gone by now, or the device waits until it is: its
        # memory is then free on the stream that it came from, in that stream's order
        while len(self._leaving) >= ON_DEVICE:
            self._let_go()
        hidden = hidden.contiguous()
        kept = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            kept.copy_(hidden, non_blocking=True)
            self._leaving.append((hidden, self._stream.record_event()))
        return kept

    def fetch(self, kept: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Begin to copy it back; return the copy, and what to wait for before it is read."""
        while self._leaving:
            self._let_go()
        current = torch.cuda.current_stream(self.device)
        back = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
        self._stream.wait_stream(current)  # which may still use this memory for something else
        with torch.cuda.stream(self._stream):
            back.copy_(kept, non_blocking=True)
            return back, self._stream.record_event()

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
        else:
            self._fetched, self._arrived = self._lane.fetch(self._kept)
