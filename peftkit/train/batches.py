"""Which rows each optimizer step learns from, how they are cut, and how they come to the model.

A step's rows are a function of seed and step alone: there is no iterator and so no state, and a
resumed run asks for its next step and gets the same rows.

While a GPU computes a step, a thread collates the rows of the next into pinned memory. Their copies
then wait for nothing, and the GPU not for Python. On a CPU rows are collated when they are needed:
there the thread would take the time from the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from peftkit.tasks.base import Task


class StatelessSampler:
    """A shuffled pass over the rows per epoch, cut into groups of one optimizer step each.

    Args:
        num_rows: Rows of one epoch.
        rows_per_step: Rows of a group, all processes together; an epoch's last may be smaller.
        seed: Of the shuffles.
    """

    def __init__(self, num_rows: int, rows_per_step: int, seed: int) -> None:
        self.num_rows, self.rows_per_step, self.seed = num_rows, rows_per_step, seed
        self.steps_per_epoch = math.ceil(num_rows / rows_per_step)
        self._epoch = -1
        self._shuffled = torch.empty(0, dtype=torch.int64)

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and how many of the epoch's rows were used before it."""
        epoch, group = divmod(step, self.steps_per_epoch)
        return epoch, group * self.rows_per_step

    def step_indices(self, step: int, rank: int = 0, world_size: int = 1) -> list[int]:
        """Return one process's share of the rows of a step, possibly none of a small last group."""
        epoch, start = self.position(step)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shuffled = torch.randperm(self.num_rows, generator=generator)
            self._epoch = epoch
        # strided, so that a small last group is spread evenly
        chosen: list[int] = self._shuffled[start : start + self.rows_per_step].tolist()
        return chosen[rank::world_size]


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
        return self._device.type == "cuda" and self._task.collates_ahead

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


def on_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor there, without a wait for the device."""
    made = torch.tensor([float(number) for number in numbers])
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


def _key(parts: Parts) -> _Key:
    return tuple(tuple(map(id, part)) for part in parts)
