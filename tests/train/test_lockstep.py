"""Who has fewer batches of a kind runs a row of that kind for the others."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from peftkit.execution.world import Parallel, Part
from peftkit.train.batches import Lockstep


class Two:
    """One of two processes, the other of which says what it is told."""

    device = torch.device("cpu")
    rank, world_size = 0, 2

    def __init__(self, other: list[int]) -> None:
        self.other = other

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.tensor(self.other)])


ROWS = [("text", 5), ("image", 9), ("text", 2), ("image", 4)]


def in_step(other: list[int]) -> Lockstep:
    world: Any = Two(other)
    task: Any = SimpleNamespace(bucket_key=lambda row: row[0])
    return Lockstep(world, task, ROWS)


def test_kinds_come_in_one_order_and_are_filled_up():
    parts: list[Part] = [ROWS[2:3], ROWS[:1], ROWS[1:2]]
    passes = in_step([3, 1]).align(parts)  # batches of images and text that the other process has
    assert [(rows[0][0], is_own) for rows, is_own in passes] == [
        ("image", True),
        ("image", False),
        ("image", False),
        ("text", True),
        ("text", True),
    ]
    assert [rows for rows, is_own in passes if is_own] == [ROWS[1:2], ROWS[2:3], ROWS[:1]]


def test_a_process_without_rows_runs_as_many_as_the_other():
    assert [rows[0][0] for rows, _ in in_step([1, 2]).align([])] == ["image", "text", "text"]


def test_processes_that_do_not_depend_on_each_other_run_what_they_have():
    parts: list[Part] = [ROWS[:2]]
    world: Any = Two([9, 9])
    assert Parallel(world).align(parts) == [(ROWS[:2], True)]
