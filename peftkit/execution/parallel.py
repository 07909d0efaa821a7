"""How the processes of a run share the rows of a step and the passes over a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peftkit.errors import EndedTogetherError, PeftkitError
from peftkit.execution.out_of_memory import is_out_of_memory, one_line
from peftkit.execution.world import World

Part = Sequence[Any]
"""Rows that go through the model at once."""


class Parallel:
    """Data parallelism: each process has rows of its own, and runs the model as often as it needs.

    `Lockstep` overrides it: if processes hold shards of the weights, all of them have to run the
    model equally often.

    Attributes:
        in_lockstep: Whether every pass over the model needs all processes.
    """

    in_lockstep = False

    def __init__(self, world: World) -> None:
        self.world = world

    def align(self, parts: Sequence[Part]) -> list[tuple[Part, bool]]:
        """Return the passes of this process: rows, and whether they are its own.

        Others are padding that keeps the processes in lockstep. All processes have to call it.
        """
        return [(part, True) for part in parts]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do work in which no process needs another; what ends it for one, ends it for all.

        Else the others would wait for it where they next meet, and the run would end unsaved.

        Raises:
            EndedTogetherError: On all processes, if there are several and one has failed.
        """
        if self.world.world_size == 1:
            yield
            return
        error = None
        try:
            yield
        except Exception as problem:
            error = problem
        if not self.world.max(error is not None):
            return
        told = self.world.all_gather(None if error is None else _parts(error))
        rank, (asked, found, fix) = next((n, each) for n, each in enumerate(told) if each)
        found = f"In process {rank} of {len(told)}. {found}".rstrip()
        raise self.world.of_all(EndedTogetherError(asked, found=found, fix=fix)) from error

    def ran_out(self, error: Exception) -> bool:
        """Return whether memory ran out, and this process may go on with smaller batches.

        Raises:
            RunError: Memory ran out, and the other processes wait for this one.
        """
        return is_out_of_memory(error)


def _parts(error: Exception) -> tuple[str, str, str]:
    """Return what an error says: what was asked, found, and what to do."""
    if isinstance(error, PeftkitError):
        return error.asked, error.found, error.fix
    if is_out_of_memory(error):
        fix = "Fewer or shorter answers; base.quantize: nf4; a smaller base."
        return "memory ran out", one_line(error), fix
    return "a step broke off", one_line(error), ""
