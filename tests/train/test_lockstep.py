"""Who has fewer batches of a kind runs a row of that kind for the others."""

from __future__ import annotations

from typing import Any

import torch
from peftkit.tasks.lockstep import LockstepForward, Part
from torch import Tensor


class Two:
    """One of two processes, the other of which says what it is told."""

    device = torch.device("cpu")

    def __init__(self, other: list[int]) -> None:
        self.other = other

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack([own, torch.tensor(self.other)])


ROWS = [("text", 5), ("image", 9), ("text", 2), ("image", 4)]


def in_step(other: list[int], *, needed: bool = True) -> LockstepForward:
    ranks: Any = Two(other)
    return LockstepForward(ranks, lambda row: row[0], ROWS, needed=needed)


def test_kinds_come_in_one_order_and_are_filled_up() -> None:
    parts: list[Part] = [ROWS[2:3], ROWS[:1], ROWS[1:2]]
    lockstep = in_step([3, 1])  # batches of images and of text that the other process has
    passes = lockstep.padded_passes(lockstep.ordered(parts))
    assert [(rows[0][0], is_real) for rows, is_real in passes] == [
        ("image", True),
        ("image", False),
        ("image", False),
        ("text", True),
        ("text", True),
    ]
    assert [rows for rows, is_real in passes if is_real] == lockstep.ordered(parts)


def test_a_process_without_rows_runs_as_many_as_the_other() -> None:
    assert [rows[0][0] for rows, _ in in_step([1, 2]).padded_passes([])] == [
        "image",
        "text",
        "text",
    ]


def test_processes_that_do_not_depend_on_each_other_run_what_they_have() -> None:
    parts: list[Part] = [ROWS[:2]]
    assert in_step([9, 9], needed=False).padded_passes(parts) == [(ROWS[:2], True)]
