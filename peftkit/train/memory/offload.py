"""Recomputed blocks whose inputs wait in main memory: what is left on the device is one block.

While the forward pass goes on, each block's input is copied into pinned memory on a stream of its
own; in the backward pass the input of the block before is fetched while one block is computed
again, so that at most two are on the device. On a CPU the same is done by plain copies.

Shapes: a block's hidden states are (..., T, H), whatever stands before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Offload:
    """Computes blocks as `torch.utils.checkpoint.checkpoint` does, their inputs kept elsewhere."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: Callable[[], OffloadedInput | None] = lambda: None

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        """Return run(*args), to be computed again in the backward pass.

        Args:
            args: The hidden states and what else a block takes. Only the former are moved away: the
                rest is shared by all blocks.
        """
        hidden, *others = args
        if not (isinstance(hidden, Tensor) and torch.is_grad_enabled()):
            return checkpoint(run, *args, use_reentrant=False)
        parcel = OffloadedInput(hidden, self._stream(hidden.device), self._last)
        self._last = weakref.ref(parcel)

        def again(_: Tensor, *rest: Any) -> Any:
            return run(parcel.take(), *rest)

        # the empty tensor tells torch on which device the generator is to be set back
        out = checkpoint(again, hidden.new_empty(0), *others, use_reentrant=False)
        parcel.live = None
        return out

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class OffloadedInput:
    """One block's input on its way to main memory and back.

    Args:
        before: Returns the parcel of the block before, if it is still there.

    Attributes:
        live: The input itself, while the forward pass is in the block.
    """

    def __init__(
        self,
        hidden: Tensor,
        stream: torch.cuda.Stream | None,
        before: Callable[[], OffloadedInput | None],
    ) -> None:
        self.live: Tensor | None = hidden
        self._stream, self._before = stream, before
        self._device, self._needs_grad = hidden.device, hidden.requires_grad
        self._fetched: Tensor | None = None
        if stream is None:
            self._kept = hidden.detach().clone()
            return
        self._kept = torch.empty_like(hidden, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._kept.copy_(hidden.detach(), non_blocking=True)
        hidden.record_stream(stream)  # its memory is not given away before the copy is made

    def take(self) -> Tensor:
        """Return the input: the live one at first, then one that was fetched."""
        if self.live is not None:
            return self.live
        self.fetch()
        taken, self._fetched = self._fetched, None
        assert taken is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            taken.record_stream(current)
        if (before := self._before()) is not None:
            before.fetch()
        return taken.requires_grad_(self._needs_grad)

    def fetch(self) -> None:
        """Begin to bring the input back, if that has not begun."""
        if self._fetched is not None or self.live is not None:
            return
        if self._stream is None:
            self._fetched = self._kept.clone()
            return
        with torch.cuda.stream(self._stream):
            self._fetched = self._kept.to(self._device, non_blocking=True)
