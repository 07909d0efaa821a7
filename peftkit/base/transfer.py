"""Copies of frozen weights from main memory to a device that holds two units of them at a time.

A unit is copied as a whole: the packed tensors of a block, or some of its experts. It occupies one
allocation on the device, which follows the order of the compute stream: the copy stream waits until
the previous user of that memory has finished.

Pinned main memory is copied directly. Pages of a mapped file cannot be pinned: they are copied into
pinned memory if there is room. Otherwise a thread stages them in a small ring of pinned buffers and
launches the copies, several times slower, which keeps file reads and copies off the thread that
computes. On a CPU the copies are ordinary memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from peftkit.kernels.device import PINNING, free_bytes, pinned_empty, trim_malloc

ALIGNMENT = 32
"""Alignment in bytes of each tensor in a unit."""
SLOT, NUM_SLOTS = 1 << 24, 8
"""Bytes per buffer of the ring (torch pins powers of two), and the number of buffers."""
FREE_SHARE = 0.5
"""Share of the free main memory that pinned copies of mapped files leave, for activations."""
SEGMENT = 1 << 28
"""Largest segment of an arena in bytes; a larger tensor gets the next power of two."""
ON_DEVICE = 2
"""Units on the device: one in use and one being copied."""


class Unit:
    """Tensors in main memory that are copied together.

    Args:
        key: Identifier of the unit.
        host: The tensors, of any shapes and dtypes.
        is_pinned: Whether all of them are in pinned memory.
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
                values = tensor.detach().contiguous().flatten().view(torch.uint8)
                values = values[first - begin : last - begin]
                target[first - start : last - start].copy_(values, non_blocking=non_blocking)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of the unit's tensors in a copy of its bytes (num_bytes,)."""
        return [
            flat[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for begin, tensor in zip(self._starts, self.host, strict=True)
        ]


class DeviceBuffer:
    """The units on a device.

    Attributes:
        resident: Number of units with a copy on the device.
        most_resident: The maximum of `resident` so far.
        bytes_moved: Bytes copied to the device so far.
    """

    def __init__(self, copies: CopyStream) -> None:
        self.resident = self.most_resident = self.bytes_moved = 0
        self._copies = copies
        self._there: dict[Any, tuple[Tensor, Any]] = {}

    def take(self, unit: Unit, following: Unit | None = None) -> Tensor:
        """Return a unit's bytes, ready for the current stream, and prefetch the next unit."""
        units = [unit] if following is None else [unit, following]
        for member in units:
            self.expect(member, keep=[other.key for other in units])
        flat, arrival = self._there[unit.key]
        self._copies.wait(arrival)
        self._there[unit.key] = flat, None
        return flat

    def expect(self, unit: Unit, keep: Sequence[object] = ()) -> None:
        """Start copying a unit to the device unless it is there.

        Evict the oldest units not in `keep`.
        """
        if unit.key in self._there:
            return
        for key in [key for key in self._there if key not in keep]:
            if len(self._there) < ON_DEVICE:
                break
            # left by an interrupted pass: its copy must finish before the memory is freed
            self._copies.wait(self._there.pop(key)[1])
        flat, arrival = self._copies.send(unit)
        self._there[unit.key] = flat, arrival
        self.bytes_moved += sum(tensor.nbytes for tensor in unit.host)
        self.resident += 1
        self.most_resident = max(self.most_resident, self.resident)
        weakref.finalize(flat.untyped_storage(), self._on_free)

    def _on_free(self) -> None:
        self.resident -= 1


class CopyStream:
    """Copies units to a device: on a GPU in a separate stream, through the ring if not pinned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker: ThreadPoolExecutor | None = None
        self._slots: list[tuple[Tensor, Any]] = []

    def send(self, unit: Unit) -> tuple[Tensor, object]:
        """Start copying a unit; return its bytes (N,) on the device and the event to wait for."""
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
            arrival = arrival.result()  # the copies are launched, not finished
        if arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(arrival)

    def _through_ring(self, unit: Unit, target: list[Tensor], free: Any) -> Any:
        assert self._stream is not None
        flat = target.pop()  # the executor would otherwise keep a reference to it
        self._stream.wait_event(free)
        sent = None
        for start in range(0, unit.num_bytes, SLOT):
            stop = min(start + SLOT, unit.num_bytes)
            if len(self._slots) < NUM_SLOTS:
                slot = pinned_empty([SLOT], torch.uint8)  # if it is not pinned, copies block
            else:
                slot, sent = self._slots.pop(0)
                sent.synchronize()
            unit.store(start, stop, slot[: stop - start])
            with torch.cuda.stream(self._stream):
                flat[start:stop].copy_(slot[: stop - start], non_blocking=True)
                sent = self._stream.record_event()
            self._slots.append((slot, sent))
        return sent


class PinnedArena:
    """Pinned memory for frozen weights, in segments that many tensors share.

    torch rounds pinned allocations up to a power of two, up to twice a weight's size. Segments are
    powers of two, and each tensor goes into the first segment with room for it.
    Copies of mapped files take main memory that the pages of the file did not, so a share of what
    is free at the start remains free.
    """

    def __init__(self) -> None:
        self._least_free = int(FREE_SHARE * (free_bytes() or 0))
        self._tails: list[Tensor] = []
        self._held = 0

    def pin(self, tensors: Sequence[Tensor]) -> bool:
        """Move tensors in main memory here, in place; return whether all of them are pinned.

        Without enough free main memory, tensors stay where they are, for example in a mapped file.
        """
        return all(tensor.is_pinned() or self._moved(tensor) for tensor in tensors)

    def _moved(self, tensor: Tensor) -> bool:
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        number = next((n for n, tail in enumerate(self._tails) if len(tail) >= size), None)
        if number is None:
            number = len(self._tails)
            # at most an eighth of the total so far, to waste little memory on a small base too
            whole = 1 << (max(size, min(self._held // 8, SEGMENT)) - 1).bit_length()
            trim_malloc()  # moved tensors have left free pages
            if (free := free_bytes()) is not None and free - whole < self._least_free:
                return False
            try:
                self._tails.append(torch.empty(whole, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                PINNING.failed(error)
                return False
            self._held += whole
        tail = self._tails[number]
        self._tails[number] = tail[size:]
        copy = tail[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = copy.copy_(tensor.data)
        return True
