"""Passes of the model that all processes make together.

Where each keeps a part of the weights, or of a row's tokens, a pass gathers the others'. So all
processes have to run the model equally often, and the same parts of it: a batch with images runs
the vision tower too. Who has fewer batches of a kind runs a short row of that kind, from which
nothing is learnt.

Some losses compare rows with each other, or with a mean over all of them (KTO). Each row is then
looked at first, without a gradient; what is seen goes to all processes, and into every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from peftkit.data.pack import num_tokens
from peftkit.errors import RunError
from peftkit.execution import rng
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.world import World

LOOKED_AT = 1000
"""Rows of which the shortest is taken, where all are of one kind."""

Part = Sequence[Any]
Pass = tuple[Part, bool]
"""Rows that go through the model at once, and whether they are this process's own."""


class LockstepForward:
    """Keeps the processes of a run in step.

    Args:
        bucket_key: As `Task.bucket_key`.
        rows: Those of the run, the same on every process; one of each kind at least.

    Attributes:
        needed: Whether processes depend on each other in every pass.
    """

    def __init__(
        self, ranks: World, bucket_key: Callable[[Any], Any], *rows: Sequence[Any], needed: bool
    ) -> None:
        self._ranks, self._bucket_key, self.needed = ranks, bucket_key, needed
        self._idle: dict[Any, Part] = {}
        if not needed:
            return
        is_one = bucket_key(rows[0][0]) is None
        for row in islice(rows[0], LOOKED_AT) if is_one else chain(*rows):
            known = self._idle.get(bucket_key(row))
            if known is None or num_tokens(row) < num_tokens(known[0]):
                self._idle[bucket_key(row)] = [row]

    def ordered(self, parts: Sequence[Part]) -> list[Part]:
        """Return parts in the order of their kinds, which is the same on all processes."""
        if not self.needed:
            return [*parts]
        return sorted(parts, key=lambda part: str(self._bucket_key(part[0])))

    def padded_passes(self, parts: Sequence[Part]) -> list[Pass]:
        """Return this process's ordered parts, and between them what it runs for the others.

        All processes have to ask.
        """
        if not self.needed:
            return [(part, True) for part in parts]
        kinds = sorted(self._idle, key=str)
        own = {kind: [(p, True) for p in parts if self._bucket_key(p[0]) == kind] for kind in kinds}
        counts = torch.tensor([len(own[kind]) for kind in kinds], device=self._ranks.device)
        most = self._ranks.gather(counts).amax(0).tolist()
        found: list[Pass] = []
        for kind, number in zip(kinds, most, strict=True):
            found += own[kind] + [(self._idle[kind], False)] * (number - len(own[kind]))
        return found

    def ran_out(self, error: Exception) -> bool:
        """Tell whether an error means that memory ran out, and that this process can go on.

        Raises:
            RunError: It can neither go on nor be left out.
        """
        if is_out_of_memory(error) and self.needed:
            raise RunError(
                "memory ran out on one process, and the others wait for it in every pass",
                fix="Lower train.tokens_per_batch or train.batch_size, or set "
                "train.gradient_checkpointing: true.",
            ) from None
        return is_out_of_memory(error)

    def step_values(
        self, look: Callable[[Part], Tensor], rows: Sequence[Any], passes: Sequence[Pass]
    ) -> GlobalBatchValues | None:
        """Compute this process's row values, part by part, and gather those of all others.

        All processes have to ask. None: memory ran out on one of them.

        Args:
            look: Returns (rows, K) of a part.
        """
        ranks, order = self._ranks, {id(row): n for n, row in enumerate(rows)}
        parts = [part for part, is_real in passes if is_real]
        states, seen, short = list[rng.State](), list[Tensor](), False
        try:
            for part, is_real in passes:
                state, values = rng.capture(ranks.device), look(part).float()
                if is_real:
                    states.append(state)
                    seen.append(values)
        except Exception as error:
            if not self.ran_out(error):
                raise
            short = True
        if ranks.max(short):
            return None
        values, first = torch.zeros(0, device=ranks.device), 0
        if parts:
            found = torch.cat(seen)
            index = torch.tensor([order[id(row)] for part in parts for row in part])
            values = torch.empty_like(found).index_copy_(0, index.to(found.device), found)
        if ranks.world_size > 1:
            values, first = _of_all(values, ranks)
        places = {row: first + n for row, n in order.items()}
        by_rows = {
            tuple(places[id(row)] for row in part): state
            for part, state in zip(parts, states, strict=True)
        }
        return GlobalBatchValues(values, places, by_rows)


@dataclass(frozen=True, slots=True)
class GlobalBatchValues:
    """The row values of a step.

    Attributes:
        values: (N, K), of all rows on all processes.
        places: Where among them a row of this process is, by its id().
        states: Of the generators when a part of the rows was looked at, by its rows' places: what
            dropout leaves out is then the same when its gradient is made.
    """

    values: Tensor
    places: Mapping[int, int]
    states: Mapping[tuple[int, ...], rng.State]

    def where(self, rows: Sequence[Any]) -> tuple[int, ...]:
        """Return the places of rows; one that is run for other processes has any other's."""
        return tuple(self.places.get(id(row), 0) for row in rows)

    def restore(self, batch: Mapping[str, Tensor], device: torch.device) -> None:
        """Put the generators where they were when a batch's rows were looked at, if they were."""
        state = self.states.get(tuple(batch["step_index"].tolist()))  # it is on the CPU still
        if state is not None:
            rng.restore(state, device)

    def given_to(self, batch: Mapping[str, Tensor], rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return a batch of these rows with what it needs of the whole step."""
        return {
            **batch,
            "step_values": self.values,
            "step_index": torch.tensor(self.where(rows)),
        }


def _of_all(values: Tensor, ranks: World) -> tuple[Tensor, int]:
    """Return the values of all processes, one after the other, and where this one's begin."""
    shape = torch.tensor([*values.shape, 0][:2], device=ranks.device)
    shapes = ranks.gather(shape)  # (world_size, 2): a small last step may leave some without rows
    counts, width = shapes[:, 0].tolist(), int(shapes[:, 1].max())
    first = sum(counts[: ranks.rank])
    table = values.new_zeros(sum(counts), width, dtype=torch.float32)
    if len(values):
        table[first : first + len(values)] = values
    return ranks.sum(table), first
