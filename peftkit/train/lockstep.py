"""Lockstep: all processes run the model equally often.

If each process holds a shard of the weights, a pass over the model gathers the other shards. All
processes also have to run the same modules: a batch with images runs the vision tower. A process
with fewer batches of a kind pads with a short row of that kind, whose loss is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch

from peftkit.data.rows.lazy import num_tokens
from peftkit.errors import RunError
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.parallel import Parallel, Part
from peftkit.execution.world import World
from peftkit.tasks.base import Task

SEARCHED_ROWS = 1000
"""Number of rows searched for the shortest one, if all rows are of one kind."""


class Lockstep(Parallel):
    """Processes that must all run the same number of forward passes (FSDP).

    Args:
        task: `Task.bucket_key` is the kind of a row.
        rows: All rows of the run, the same on every process; at least one of each kind.
    """

    in_lockstep = True

    def __init__(self, world: World, task: Task, *rows: Sequence[Any]) -> None:
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
