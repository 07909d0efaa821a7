"""Row values of a whole step, for losses that depend on other rows (KTO).

Some losses compare rows with each other, or with a mean over all of them. Each row is then looked
at first, without a gradient; what is seen goes to all processes, and into every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peftkit.train import rng
from peftkit.train.lockstep import Pass
from peftkit.train.world import World


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


def step_values(
    look: Callable[[Sequence[Any]], Tensor],
    rows: Sequence[Any],
    passes: Sequence[Pass],
    ranks: World,
) -> GlobalBatchValues:
    """Compute this process's row values, part by part, and gather those of all others.

    Args:
        look: Returns (rows, K) of a part.
    """
    order = {id(row): n for n, row in enumerate(rows)}
    parts = [part for part, is_real in passes if is_real]
    states, seen = [], []
    for part, is_real in passes:
        state, values = rng.capture(ranks.device), look(part).float()
        if is_real:
            states.append(state)
            seen.append(values)
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
