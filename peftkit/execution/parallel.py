"""Distribute the micro-batches of a step over the processes of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peftkit.errors import EndedTogetherError, PeftkitError
from peftkit.execution.out_of_memory import is_out_of_memory, one_line
from peftkit.execution.world import World

Part = Sequence[Any]
"""Rows of one forward pass (a micro-batch)."""


class Parallel:
    """Data parallelism: processes have different rows and any number of forward passes.

    `Lockstep` overrides this class for sharded weights, where all processes must run the same
    number of forward passes.

    Attributes:
        in_lockstep: Whether every forward pass needs all processes.
    """

    in_lockstep = False

    def __init__(self, world: World) -> None:
        self.world = world

    def align(self, parts: Sequence[Part]) -> list[tuple[Part, bool]]:
        """Return the micro-batches of this process, each with whether it counts.

        The others are padding that keeps the processes in lockstep. All processes must call this.
        """
        return [(part, True) for part in parts]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run independent work of the processes; an error in one is raised in all.

        Otherwise the other processes would hang in the next collective.

        Raises:
            EndedTogetherError: On all processes, if there are several and one failed.
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
        failures = self.world.all_gather(None if error is None else _error_fields(error))
        rank, (message, reason, fix) = next(
            (n, fields) for n, fields in enumerate(failures) if fields
        )
        reason = f"In process {rank} of {len(failures)}. {reason}".rstrip()
        raise self.world.of_all(EndedTogetherError(message, found=reason, fix=fix)) from error

    def ran_out(self, error: Exception) -> bool:
        """Return whether memory ran out and this process may continue with smaller batches.

        Raises:
            RunError: Memory ran out, and the other processes depend on this one.
        """
        return is_out_of_memory(error)


def _error_fields(error: Exception) -> tuple[str, str, str]:
    """Return the problem, `found` and `fix` of an error."""
    if isinstance(error, PeftkitError):
        return error.problem, error.found, error.fix
    if is_out_of_memory(error):
        fix = "Use fewer or shorter answers, base.quantize: nf4, or a smaller base."
        return "memory ran out", one_line(error), fix
    return "a step failed", one_line(error), ""
