"""Which rows each optimizer step learns from: a function of seed and step alone.

There is no iterator and so no state: a resumed run asks for its next step and gets the same rows.
"""

from __future__ import annotations

import math

import torch


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
