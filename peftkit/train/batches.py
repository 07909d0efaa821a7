"""Which rows each optimizer step learns from, and how they are cut into micro-batches.

A step's rows are a function of seed and step alone: there is no iterator and so no state, and a
resumed run asks for its next step and gets the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

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


def split_micro_batches(
    rows: Sequence[Any],
    num_positions: Callable[[Sequence[Any]], int],
    max_rows: int,
    max_tokens: int | None = None,
    bucket_key: Callable[[Any], Any] | None = None,
) -> list[Sequence[Any]]:
    """Return rows in micro-batches of at most so many rows and tokens, padding included.

    They keep their order unless that has too many tokens. Then they are sorted, the longest first:
    rows of a length lie together, and where memory does not suffice, that shows at once. One row
    alone may have more tokens.

    Args:
        num_positions: Tokens of rows that go through the model at once, padding included.
        bucket_key: Rows of different kinds share no micro-batch.
    """
    if bucket_key is not None:
        groups: dict[Any, list[Any]] = {}
        for row in rows:
            groups.setdefault(bucket_key(row), []).append(row)
        return [
            part
            for group in groups.values()
            for part in split_micro_batches(group, num_positions, max_rows, max_tokens)
        ]
    parts = [rows[start : start + max_rows] for start in range(0, len(rows), max_rows)]
    if max_tokens is None or all(num_positions(part) <= max_tokens for part in parts):
        return parts
    fitting: list[Sequence[Any]] = [[]]
    for row in sorted(rows, key=lambda row: num_positions([row]), reverse=True):
        part = [*fitting[-1], row]
        if len(part) == 1 or (len(part) <= max_rows and num_positions(part) <= max_tokens):
            fitting[-1] = part
        else:
            fitting.append([row])
    return fitting
