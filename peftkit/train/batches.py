"""The rows of each optimizer step, and their batches.

A step's rows are a function of seed and step alone. There is no iterator with a state, and a
resumed run gets the same rows.

While a GPU computes a step, a thread collates the rows of the next one into pinned memory, and the
GPU does not wait for Python. On a CPU rows are collated when they are needed, since the thread
would take time from the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from peftkit.data.rows.lazy import num_tokens
from peftkit.errors import RunError
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.world import Parallel, Part, Rows, World
from peftkit.kernels.device import pinned_copy
from peftkit.tasks.base import Task


class StatelessSampler:
    """A shuffled pass over the rows per epoch, cut into groups of one optimizer step each.

    Args:
        num_rows: Rows of one epoch.
        rows_per_step: Rows of a group, on all processes; an epoch's last may be smaller.
        seed: Seed of the shuffles.
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
        # strided, which spreads a small last group evenly
        chosen: list[int] = self._shuffled[start : start + self.rows_per_step].tolist()
        return chosen[rank::world_size]


Batch = Mapping[str, Tensor]
_Key = tuple[tuple[int, ...], ...]


class BatchPrefetcher:
    """Collates rows into batches; on a GPU ahead of time, if the next rows exist already."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self._worker: ThreadPoolExecutor | None = None
        # by the ids of their rows; references to the rows keep their ids unique
        self._pending: dict[_Key, tuple[Sequence[Part], Future[list[Batch]]]] = {}

    @property
    def is_ahead(self) -> bool:
        """Whether rows are collated before they are needed."""
        return self._device.type == "cuda" and self._task.collates_ahead

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Start collating the parts of the next call of `batches`."""
        if not self.is_ahead:
            return
        parts = [list(part) for part in parts]  # lazy sequences are not thread-safe
        if _key(parts) in self._pending:
            return
        if self._worker is None:
            # a new thread pins memory for the first GPU by default
            self._worker = ThreadPoolExecutor(
                1, "collate", initializer=torch.cuda.set_device, initargs=(self._device,)
            )
        self._pending[_key(parts)] = parts, self._worker.submit(self._collate, parts)

    def batches(self, parts: Sequence[Part]) -> list[Batch]:
        """Return a batch of each part; drops prefetched batches of other parts."""
        parts = [list(part) for part in parts]
        pending = self._pending.pop(_key(parts), None)
        if pending is not None:
            return pending[1].result()
        self._pending.clear()
        return self._collate(parts)

    def close(self) -> None:
        """End the thread."""
        self._pending.clear()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None

    def _collate(self, parts: Sequence[Part]) -> list[Batch]:
        batches = [self._task.collate(part) for part in parts]
        if self._device.type != "cuda":
            return batches
        return [{name: pinned_copy(tensor) for name, tensor in batch.items()} for batch in batches]


def on_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers to a tensor on the device, without waiting for the device."""
    tensor = torch.tensor([float(number) for number in numbers])
    if device.type != "cuda":
        return tensor.to(device)
    return pinned_copy(tensor).to(device, non_blocking=True)


def _key(parts: Sequence[Part]) -> _Key:
    return tuple(tuple(map(id, part)) for part in parts)


SEARCHED_ROWS = 1000
"""Number of rows searched for the shortest one, if all rows are of one kind."""


class Lockstep(Parallel):
    """Processes that must all run the same number of forward passes (FSDP).

    Args:
        task: `Task.bucket_key` is the kind of a row.
        rows: All rows of the run, the same on every process; at least one of each kind.
    """

    in_lockstep = True

    def __init__(self, world: World, task: Task, *rows: Rows) -> None:
        super().__init__(world)
        self._kind = task.bucket_key
        self._shortest: dict[Any, Part] = {}
        one_kind = self._kind(rows[0][0]) is None
        for row in islice(rows[0], SEARCHED_ROWS) if one_kind else chain(*rows):
            shortest = self._shortest.get(self._kind(row))
            if shortest is None or num_tokens(row) < num_tokens(shortest[0]):
                self._shortest[self._kind(row)] = [row]

    def align(self, parts: Sequence[Part]) -> list[tuple[Part, bool]]:
        kinds = sorted(self._shortest, key=str)
        parts_of = {
            kind: [(part, True) for part in parts if self._kind(part[0]) == kind] for kind in kinds
        }
        counts = torch.tensor([len(parts_of[kind]) for kind in kinds], device=self.world.device)
        passes: list[tuple[Part, bool]] = []
        for kind, number in zip(kinds, self.world.gather(counts).amax(0).tolist(), strict=True):
            padding = [(self._shortest[kind], False)] * (number - len(parts_of[kind]))
            passes += parts_of[kind] + padding
        return passes

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block in which every pass needs all processes, so failures cannot be shared."""
        yield

    def ran_out(self, error: Exception) -> bool:
        if not is_out_of_memory(error):
            return False
        raise RunError(
            "memory ran out on one process, which the others need in every pass",
            fix="Lower train.tokens_per_batch or train.batch_size, or set "
            "train.gradient_checkpointing: true.",
        ) from None
