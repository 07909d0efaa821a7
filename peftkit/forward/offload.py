"""Activation checkpointing with blocks' inputs offloaded to host memory.

In the forward pass each block's input is copied into pinned memory on a separate stream. In the
backward pass, while one block is recomputed, the previous block's input is fetched. At most two
inputs are on the device: in the forward pass the last two, whose copies may be unfinished; in the
backward pass one in use and one in transfer. `record_stream` would hold more: the host runs ahead
of the device, and marked tensors are only freed when the device has caught up. On a CPU inputs are
copied without a stream.

Inputs share chunks of pinned memory. torch would round each input up to a power of two, which
nearly doubles some: at 35,840 tokens an 8B's 9.4 GB took 17 GB.

Shapes: a block's hidden states are (..., T, H), with any leading shape.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from peftkit.kernels.device import pinned_empty

ON_DEVICE = 2
"""Maximum inputs on the device: one in use, one in transfer."""
PAGE, CHUNK = 1 << 20, 1 << 25
"""Bytes of a page, which belongs to one input, and of a chunk of pinned memory."""


class Offload:
    """`torch.utils.checkpoint.checkpoint` for blocks, with their inputs in host memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, TransferStream] = {}
        self._last: Callable[[], OffloadedInput | None] = lambda: None
        self._sent: deque[Tensor] = deque(maxlen=ON_DEVICE)  # by a count, which has no stream

    def __call__(self, run: Callable[..., Any], *args: object, preserve_rng: bool = True) -> Any:
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
        stream = self._stream_of(hidden.device)
        if stream is None:
            self._sent.append(hidden.detach())
        offloaded = OffloadedInput(hidden, stream, self._last)
        self._last = weakref.ref(offloaded)

        def again(_: Tensor, *rest: Any) -> Any:
            if offloaded.live is None:
                self._sent.clear()
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


class PinnedPages:
    """Pages of pinned memory, in chunks that later inputs reuse.

    One stream makes all copies, so a page can be reused while a copy of it is still queued.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._free: list[int] = []
        self._returned: deque[Sequence[int]] = deque()  # a finalizer may run at any time

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return len(self._chunks) * CHUNK

    def take(self, num_bytes: int) -> list[int]:
        """Return free pages with room for some bytes, in the order of memory."""
        while self._returned:
            self._free = sorted([*self._free, *self._returned.popleft()])
        number = -(-num_bytes // PAGE)
        while len(self._free) < number:
            first = len(self._chunks) * (CHUNK // PAGE)
            self._chunks.append(pinned_empty([CHUNK], torch.uint8))
            self._free.extend(range(first, first + CHUNK // PAGE))
        taken, self._free = self._free[:number], self._free[number:]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Let other inputs use pages."""
        self._returned.append(pages)

    def pieces(self, pages: Sequence[int], num_bytes: int) -> list[Tensor]:
        """Return the memory of pages, as bytes; adjacent pages of a chunk are one piece."""
        per_chunk, runs = CHUNK // PAGE, list[list[int]]()
        for page in pages:
            if runs and page == runs[-1][1] and page % per_chunk:
                runs[-1][1] += 1
            else:
                runs.append([page, page + 1])
        pieces, left = [], num_bytes
        for first, last in runs:
            start = first % per_chunk * PAGE
            size = min((last - first) * PAGE, left)
            pieces.append(self._chunks[first // per_chunk][start : start + size])
            left -= size
        return pieces


class PinnedCopy:
    """A tensor's copy in pinned pages, which it gives back when it is deleted.

    Attributes:
        pieces: The bytes, in order.
    """

    def __init__(self, tensor: Tensor, memory: PinnedPages) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        pages = memory.take(tensor.nbytes)
        self.pieces = memory.pieces(pages, tensor.nbytes)
        weakref.finalize(self, memory.give_back, pages).atexit = False

    def copy(self, tensor: Tensor, *, back: bool = False) -> None:
        """Start copying a contiguous tensor here, or from here to it, on the current stream."""
        flat, start = tensor.flatten().view(torch.uint8), 0
        for piece in self.pieces:
            part = flat[start : start + len(piece)]
            target, source = (part, piece) if back else (piece, part)
            target.copy_(source, non_blocking=True)
            start += len(piece)


class TransferStream:
    """Copies between a device and host memory on a separate CUDA stream.

    Attributes:
        memory: The pinned memory of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, PinnedPages()
        self._stream = torch.cuda.Stream(device)
        self._in_transfer: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, hidden: Tensor) -> PinnedCopy:
        """Start copying a tensor to host memory; return the pinned copy."""
        # the device waits for older copies, which frees their memory for the current stream
        while len(self._in_transfer) >= ON_DEVICE:
            self._finish_oldest()
        hidden = hidden.contiguous()
        pinned = PinnedCopy(hidden, self.memory)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            pinned.copy(hidden)
            self._in_transfer.append((hidden, self._stream.record_event()))
        return pinned

    def fetch(self, pinned: PinnedCopy) -> tuple[Tensor, torch.cuda.Event]:
        """Start copying a tensor back; return the copy and the event of its completion."""
        while self._in_transfer:
            self._finish_oldest()
        current = torch.cuda.current_stream(self.device)
        back = torch.empty(pinned.shape, dtype=pinned.dtype, device=self.device)
        self._stream.wait_stream(current)  # the current stream may still use this memory
        with torch.cuda.stream(self._stream):
            pinned.copy(back, back=True)
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
        hidden = hidden.detach()
        self._in_main = hidden.clone() if stream is None else stream.send(hidden)

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
        if isinstance(self._in_main, PinnedCopy):
            assert self._stream is not None
            self._fetched, self._arrived = self._stream.fetch(self._in_main)
        else:
            self._fetched = self._in_main.clone()
