"""How the processes of a run share the rows of a step and the passes over a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.world import World

Part = Sequence[Any]
"""Rows that go through the model at once."""


class Parallel:
    """Data parallelism: each process has rows of its own, and runs the model as often as it needs.

    Others override it: where processes hold shards of the weights, or parts of one row, all of
    them have to run the model equally often.

    Attributes:
        rank, size: This process among those that have different rows, and how many these are.
        in_lockstep: Whether every pass over the model needs all processes.
    """

    in_lockstep = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank, self.size = world.rank, world.world_size

    def adapt(self, task: Any) -> Any:
        """Return the task that computes this process's share of a batch."""
        return task

    def align(self, parts: Sequence[Part]) -> list[tuple[Part, bool]]:
        """Return the passes of this process: rows, and whether they are its own.

        Others are padding that keeps the processes in lockstep. All processes have to call it.
        """
        return [(part, True) for part in parts]

    def ran_out(self, error: Exception) -> bool:
        """Return whether memory ran out, and this process may go on with smaller batches.

        Raises:
            RunError: Memory ran out, and the other processes wait for this one.
        """
        return is_out_of_memory(error)
