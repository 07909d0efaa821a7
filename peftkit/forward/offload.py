"""Activation checkpointing with blocks' inputs offloaded to host memory.

In the forward pass each block's input is copied into pinned memory on a separate stream. In the
backward pass, while one block is recomputed, the previous block's input is fetched. At most two
inputs are on the device: in the forward pass the last two, whose copies may be unfinished; in the
backward pass one in use and one in transfer. `record_stream` would hold more: the host runs ahead
of the device, and marked tensors are only freed when the device has caught up. torch's allocator
reuses pinned memory in later steps. On a CPU inputs are copied without a stream.

Shapes: a block's hidden states are (..., T, H), with any leading shape.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from peftkit.kernels.device import pinned_empty

ON_DEVICE = 2
"""Maximum inputs on the device: one in use, one in transfer."""


class Offload:
    """`torch.utils.checkpoint.checkpoint` for blocks, with their inputs in host memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, TransferStream] = {}
        self._last: Callable[[], OffloadedInput | None] = lambda: None

    def __call__(self, run: Callable[..., Any], *args: Any, preserve_rng: bool = True) -> Any:
        """Return run(*args), which is recomputed in the backward pass.

        Args:
            args: The hidden states, then a block's other arguments. Only the hidden states are
                offloaded, because all blocks share the others.
            preserve_rng: Whether to recompute with the same random numbers.
        """
        hidden, *others = args
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng}
        if not (isinstance(hidden, Tensor) and torch.is_grad_enabled()):
            return checkpoint(run, *args, **options)
        offloaded = OffloadedInput(hidden, self._stream_of(hidden.device), self._last)
        self._last = weakref.ref(offloaded)

        def again(_: Tensor, *rest: Any) -> Any:
            return run(offloaded.take(), *rest)

        # the empty tensor tells torch which device's generator to restore
        out = checkpoint(again, hidden.new_empty(0), *others, **options)
        offloaded.live = None
        return out

    def _stream_of(self, device: torch.device) -> TransferStream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = TransferStream(device)
        return self._streams[device]


class TransferStream:
    """Copies between a device and host memory on a separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._in_transfer: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, hidden: Tensor) -> Tensor:
        """Start copying a tensor to host memory; return the pinned copy."""
        # the device waits for older copies, which frees their memory for the current stream
        while len(self._in_transfer) >= ON_DEVICE:
            self._finish_oldest()
        hidden = hidden.contiguous()
        pinned = pinned_empty(hidden.shape, hidden.dtype)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(hidden, non_blocking=True)
            self._in_transfer.append((hidden, self._stream.record_event()))
        return pinned

    def fetch(self, pinned: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start copying a tensor back; return the copy and the event of its completion."""
        while self._in_transfer:
            self._finish_oldest()
        current = torch.cuda.current_stream(self.device)
        back = torch.empty(pinned.shape, dtype=pinned.dtype, device=self.device)
        self._stream.wait_stream(current)  # the current stream may still use this memory
        with torch.cuda.stream(self._stream):
            back.copy_(pinned, non_blocking=True)
            return back, self._stream.record_event()

    def _finish_oldest(self) -> None:
        _, sent = self._in_transfer.popleft()
        torch.cuda.current_stream(self.device).wait_event(sent)


class OffloadedInput:
    """One block's input in host memory.

    Args:
        stream: Copies the input; None on a CPU.
        before: Returns the previous block's input, if it still exists.

    Attributes:
        live: The input itself, while the forward pass is in the block.
    """

    def __init__(
        self,
        hidden: Tensor,
        stream: TransferStream | None,
        before: Callable[[], OffloadedInput | None],
    ) -> None:
        self.live: Tensor | None = hidden
        self._stream, self._before = stream, before
        self._needs_grad = hidden.requires_grad
        self._fetched: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._in_main = hidden.detach().clone() if stream is None else stream.send(hidden.detach())

    def take(self) -> Tensor:
        """Return the input on the device, and start fetching the previous block's input."""
        if self.live is not None:
            return self.live
        self.fetch()
        hidden, self._fetched = self._fetched, None
        assert hidden is not None
        if self._stream is not None and self._arrived is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._arrived)
        if (before := self._before()) is not None:
            before.fetch()
        return hidden.requires_grad_(self._needs_grad)

    def fetch(self) -> None:
        """Start copying the input back to the device, once."""
        if self._fetched is not None or self.live is not None:
            return
        if self._stream is None:
            self._fetched = self._in_main.clone()
        else:
            self._fetched, self._arrived = self._stream.fetch(self._in_main)
