"""Which kind of parallelism a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from peftkit.base.sharding import is_sharded
from peftkit.execution.parallel import Parallel
from peftkit.execution.world import World
from peftkit.tasks.base import Task


def parallel_of(
    world: World, model: nn.Module, task: Task, context_parallel: int, *rows: Sequence[Any]
) -> Parallel:
    """Return how the processes of a run share rows and passes.

    Args:
        context_parallel: Processes that have parts of one row, as in train.context_parallel.
        rows: Those of the run, the same on every process.

    Raises:
        RunError: The processes do not make up whole groups.
    """
    if context_parallel > 1:
        from peftkit.train.context_parallel import ContextParallel

        return ContextParallel(world, task, context_parallel, *rows)
    if is_sharded(model):
        from peftkit.train.lockstep import Lockstep

        return Lockstep(world, task, *rows)
    return Parallel(world)
