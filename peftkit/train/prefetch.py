"""Batches on their way to the model: on a GPU made a step ahead, pinned, moved as far as read.

While the GPU computes a step, a thread collates the rows of the next into pinned memory. Their
copies then wait for nothing, and the GPU not for Python. On a CPU rows are collated when they are
needed: there the thread would take the time from the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from peftkit.train.task import Task

Batch = Mapping[str, Tensor]
Parts = Sequence[Sequence[Any]]
_Key = tuple[tuple[int, ...], ...]


class BatchPrefetcher:
    """Makes batches of rows, ahead where it is told what comes next.

    Args:
        device: Where the model is.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self._worker: ThreadPoolExecutor | None = None
        # the rows are kept too: a row that is gone could leave its id to another
        self._coming: dict[_Key, tuple[Parts, Future[list[Batch]]]] = {}

    @property
    def is_ahead(self) -> bool:
        """Whether rows are collated before they are needed."""
        return self._device.type == "cuda" and not self._task.draws_in_collate

    def prefetch(self, parts: Parts) -> None:
        """Begin to make the batches that will be asked for next."""
        if not self.is_ahead or _key(parts) in self._coming:
            return
        if self._worker is None:
            # a thread begins on the first GPU: memory pinned there would be another one's
            self._worker = ThreadPoolExecutor(
                1, "collate", initializer=torch.cuda.set_device, initargs=(self._device,)
            )
        self._coming[_key(parts)] = parts, self._worker.submit(self._made, parts)

    def batches(self, parts: Parts) -> list[Batch]:
        """Return a batch of each part; what was expected instead of these is forgotten."""
        found = self._coming.pop(_key(parts), None)
        if found is not None:
            return found[1].result()
        self._coming.clear()
        return self._made(parts)

    def to_device(self, batch: Batch) -> Batch:
        """Return a batch whose tensors come to the device when they are read."""
        return OnDevice(batch, self._device)

    def close(self) -> None:
        """End the thread."""
        self._coming.clear()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None

    def _made(self, parts: Parts) -> list[Batch]:
        made = [self._task.collate(part) for part in parts]
        if self._device.type != "cuda":
            return made
        return [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in made]


class OnDevice(Mapping[str, Tensor]):
    """A batch on a device; each tensor is moved once, when it is first read."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._batch, self._device = batch, device
        self._moved: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._moved:
            tensor = self._batch[name]
            self._moved[name] = tensor.to(self._device, non_blocking=tensor.is_pinned())
        return self._moved[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


def on_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor there, without a wait for the device."""
    made = torch.tensor([float(number) for number in numbers])
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


def _key(parts: Parts) -> _Key:
    return tuple(tuple(map(id, part)) for part in parts)
