"""Copies of frozen weights from main memory to a device, which holds two units of them at a time.

A unit is copied together: a block's packed tensors, or some of its experts. Its copies follow each
other in one allocation, which is made and freed in the order of the stream that computes: the
copying stream waits until the memory's former user is done with it.

Main memory that is pinned is copied from at once. Pages of a mapped file cannot be pinned: a thread
puts them into a small ring of pinned buffers and launches the copies, so that neither reading the
file nor copying holds up who computes. On a CPU the copies are memory like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from peftkit.kernels.device import pinned_empty

ALIGNMENT = 32
"""Bytes: where each tensor of a unit begins."""
SLOT, NUM_SLOTS = 1 << 24, 8
"""Bytes of a buffer of the ring, a power of two as torch pins them, and how many there are."""
SEGMENT = 1 << 28
"""Bytes of an arena's segment at most, a power of two; of a larger tensor the next power."""
ON_DEVICE = 2
"""Units: one in use, one on its way."""


class Unit:
    """Tensors of main memory that travel together.

    Args:
        key: What tells it from others. host: The tensors, of any shapes and dtypes.
        is_pinned: Whether all of them lie in pinned memory.
    """

    def __init__(self, key: Any, host: Sequence[Tensor], *, is_pinned: bool = False) -> None:
        self.key, self.host, self.is_pinned = key, host, is_pinned
        self._starts, self.num_bytes = [], 0
        for tensor in host:
            self._starts.append(self.num_bytes)
            self.num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def store(self, start: int, stop: int, target: Tensor, *, non_blocking: bool = False) -> None:
        """Copy the bytes from `start` to `stop` into a target (stop - start,)."""
        for begin, tensor in zip(self._starts, self.host, strict=True):
            first, last = max(begin, start), min(begin + tensor.nbytes, stop)
            if first < last:
                part = tensor.detach().contiguous().flatten().view(torch.uint8)
                part = part[first - begin : last - begin]
                target[first - start : last - start].copy_(part, non_blocking=non_blocking)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors as they lie in bytes (num_bytes,) that all were copied to."""
        return [
            flat[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for begin, tensor in zip(self._starts, self.host, strict=True)
        ]


class DeviceBuffer:
    """Units on a device.

    Attributes:
        resident: Units that have copies on the device now. most_resident: At most, so far.
        bytes_moved: To the device, so far.
    """

    def __init__(self, copies: CopyStream) -> None:
        self.resident = self.most_resident = self.bytes_moved = 0
        self._copies = copies
        self._there: dict[Any, tuple[Tensor, Any]] = {}

    def take(self, unit: Unit, then: Unit | None = None) -> Tensor:
        """Return a unit's bytes, ready for the current stream; begin to fetch the one after it."""
        units = [unit] if then is None else [unit, then]
        for each in units:
            self.expect(each, keep=[other.key for other in units])
        flat, arrival = self._there[unit.key]
        self._copies.wait(arrival)
        self._there[unit.key] = flat, None
        return flat

    def expect(self, unit: Unit, keep: Sequence[Any] = ()) -> None:
        """Begin to fetch a unit, if that has not begun; those that came first make room."""
        if unit.key in self._there:
            return
        for key in [key for key in self._there if key not in keep]:
            if len(self._there) < ON_DEVICE:
                break
            # of a pass that was broken off: it is written to until then
            self._copies.wait(self._there.pop(key)[1])
        flat, arrival = self._copies.send(unit)
        self._there[unit.key] = flat, arrival
        self.bytes_moved += sum(tensor.nbytes for tensor in unit.host)
        self.resident += 1
        self.most_resident = max(self.most_resident, self.resident)
        weakref.finalize(flat.untyped_storage(), self._gone)

    def _gone(self) -> None:
        self.resident -= 1


class CopyStream:
    """Copies units to a device: on a GPU on its own stream, through the ring if not pinned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker: ThreadPoolExecutor | None = None
        self._slots: list[tuple[Tensor, Any]] = []

    def send(self, unit: Unit) -> tuple[Tensor, Any]:
        """Start copying a unit; return its bytes (N,) on the device, and what to wait for."""
        flat = torch.empty(unit.num_bytes, dtype=torch.uint8, device=self.device)
        if self._stream is None:
            unit.store(0, unit.num_bytes, flat)
            return flat, None
        free = torch.cuda.current_stream(self.device).record_event()
        if not unit.is_pinned:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(
                    1, "transfer", initializer=torch.cuda.set_device, initargs=(self.device,)
                )
            return flat, self._worker.submit(self._through_ring, unit, [flat], free)
        self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            unit.store(0, unit.num_bytes, flat, non_blocking=True)
            return flat, self._stream.record_event()

    def wait(self, arrival: Any) -> None:
        """Make the current stream wait until a unit is on the device."""
        if isinstance(arrival, Future):
            arrival = arrival.result()  # the copies are launched, not made
        if arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(arrival)

    def _through_ring(self, unit: Unit, target: list[Tensor], free: Any) -> Any:
        assert self._stream is not None
        flat = target.pop()  # which the thread would hold on to when this is over
        self._stream.wait_event(free)
        sent = None
        for start in range(0, unit.num_bytes, SLOT):
            stop = min(start + SLOT, unit.num_bytes)
            slot = self._slot()
            unit.store(start, stop, slot[: stop - start])
            with torch.cuda.stream(self._stream):
                flat[start:stop].copy_(slot[: stop - start], non_blocking=True)
                sent = self._stream.record_event()
            self._slots.append((slot, sent))
        return sent

    def _slot(self) -> Tensor:
        """Return a buffer of the ring that nobody copies from any more."""
        if len(self._slots) < NUM_SLOTS:
            return pinned_empty([SLOT], torch.uint8)  # not pinned: this thread waits
        slot, sent = self._slots.pop(0)
        sent.synchronize()
        return slot


class PinnedArena:
    """Pinned memory of frozen weights, in segments that many tensors share.

    torch rounds what it pins up to a power of two: nearly twice a weight at worst. A segment is a
    power of two, and each tensor lies in the first one that has room for it.
    """

    def __init__(self) -> None:
        self._tails: list[Tensor] = []
        self._held = 0

    def take_in(self, tensors: Sequence[Tensor]) -> bool:
        """Move tensors of main memory here, in place; return whether all of them are pinned.

        Pages of a mapped file are left as they are: pinned, they would be copied into main memory.
        """
        return all(tensor.is_pinned() or self._moved(tensor) for tensor in tensors)

    def _moved(self, tensor: Tensor) -> bool:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # a part of a file
            return False
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        number = next((n for n, tail in enumerate(self._tails) if len(tail) >= size), None)
        if number is None:
            number = len(self._tails)
            # an eighth of all so far, so that what stays empty is little of a small base too
            whole = 1 << (max(size, min(self._held // 8, SEGMENT)) - 1).bit_length()
            try:
                self._tails.append(torch.empty(whole, dtype=torch.uint8, pin_memory=True))
            except RuntimeError:
                return False
            self._held += whole
        tail = self._tails[number]
        self._tails[number] = tail[size:]
        copy = tail[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = copy.copy_(tensor.data)
        return True
