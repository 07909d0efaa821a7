"""A step's rows are cut into micro-batches by rows and by tokens, and learn the same.

Where all processes run each pass, who has fewer batches of a kind runs a row of that kind.
"""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit.data.pack import padded
from peftkit.data.rows.lazy import num_tokens
from peftkit.execution.world import Parallel, Part
from peftkit.tasks.batches import split_micro_batches
from peftkit.tasks.text.seq2seq import PairRow
from peftkit.train.batches import Lockstep
from tests.helpers.toy import Row, Toy, make_rows, play


def rows_of(*lengths: int) -> list[Row]:
    return [Row((0,) * n, (0,) * n, f"{index}") for index, n in enumerate(lengths)]


def cut(rows: Sequence[Any], max_rows: int, max_tokens: int | None = None) -> list[Sequence[Any]]:
    return split_micro_batches(rows, lambda part: len(part) * padded(*part), max_rows, max_tokens)


def lengths(parts: list[Sequence[Row]]) -> list[list[int]]:
    return [[len(row.input_ids) for row in part] for part in parts]


def test_without_a_limit_in_tokens_rows_keep_their_order():
    assert lengths(cut(rows_of(3, 9, 1, 40, 2), 2)) == [[3, 9], [1, 40], [2]]
    assert cut([], 2) == []


def test_with_one_they_are_sorted_and_the_padding_counts():
    parts = cut(rows_of(3, 9, 1, 40, 2, 17), 4, 40)
    assert lengths(parts) == [[40], [17], [9, 3], [1, 2]]
    assert lengths(cut(rows_of(3, 9, 1, 40, 2, 17), 4, 8)) == [[40], [17], [9], [3], [1], [2]]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_in_one_part_and_no_part_is_too_large(seed):
    draw = random.Random(seed)
    rows = rows_of(*(draw.randint(1, 99) for _ in range(draw.randint(1, 40))))
    max_rows, max_tokens = draw.randint(1, 9), draw.randint(1, 300)
    parts = cut(rows, max_rows, max_tokens)
    assert sorted(row.source for part in parts for row in part) == sorted(r.source for r in rows)
    for part in parts:
        assert len(part) <= max_rows
        assert len(part) == 1 or len(part) * max(map(padded, part)) <= max_tokens


def test_the_half_of_a_model_that_reads_more_is_what_a_batch_is_cut_by():
    asks, tells = (PairRow((0,) * s, (0,) * t, "", "") for s, t in ((24, 8), (8, 30)))
    assert [num_tokens(asks), num_tokens(tells)] == [32, 38]
    assert [padded(asks), padded(tells), padded(asks, tells)] == [24, 32, 32]
    rows = [asks, tells, asks, tells]
    assert [len(part) for part in cut(rows, 4, 4 * 32)] == [4]
    assert [len(part) for part in cut(rows, 4, 4 * 32 - 1)] == [3, 1]
    assert [len(part) for part in cut([asks] * 4, 4, 2 * 24)] == [2, 2]


def test_rows_that_are_not_of_tokens_are_cut_by_rows():
    rows = [object()] * 5
    assert [len(part) for part in cut(rows, 2, 4096)] == [2, 2, 1]


def test_a_run_by_tokens_learns_the_same_from_the_same_steps(tmp_path):
    plain = play(tmp_path / "a", batch_size=4, gradient_accumulation=1)
    # 4 rows of up to 9 tokens: the long ones apart, in parts of 1 and 2 rows
    by_tokens = play(tmp_path / "b", batch_size=4, gradient_accumulation=1, tokens_per_batch=16)
    # the same gradients, summed in another order
    assert by_tokens.losses == pytest.approx(plain.losses, rel=1e-4)
    assert by_tokens.losses != plain.losses
    ours, theirs = by_tokens.result, plain.result
    assert ours.metrics["num_tokens"] == theirs.metrics["num_tokens"]
    assert ours.metrics["eval_loss"] == pytest.approx(theirs.metrics["eval_loss"], rel=1e-4)


def test_an_evaluation_keeps_to_the_limit_too(tmp_path):
    shapes: list[tuple[int, int]] = []

    class Measuring(Toy):
        def forward(self, ids):
            if not self.training:
                shapes.append(tuple(ids.shape))
            return super().forward(ids)

    play(tmp_path, model=Measuring(), eval_rows=make_rows(14), tokens_per_batch=16, max_steps=1)
    assert {rows for rows, _ in shapes} == {1, 2}
    assert all(rows == 1 or width <= 8 for rows, width in shapes)


def test_rows_of_different_kinds_share_no_micro_batch():
    rows = [3, 4, 5, 6, 7, 9, 11]
    parts = split_micro_batches(rows, len, 2, bucket_key=lambda row: row % 2)
    assert parts == [[3, 5], [7, 9], [11], [4, 6]]


class Two:
    """One of two processes, the other of which says what it is told."""

    device = torch.device("cpu")
    rank, world_size = 0, 2

    def __init__(self, other: list[int]) -> None:
        self.other = other

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.tensor(self.other)])


KINDS = [("text", 5), ("image", 9), ("text", 2), ("image", 4)]


def in_step(other: list[int]) -> Lockstep:
    world: Any = Two(other)
    task: Any = SimpleNamespace(bucket_key=lambda row: row[0])
    return Lockstep(world, task, KINDS)


def test_kinds_come_in_one_order_and_are_filled_up():
    parts: list[Part] = [KINDS[2:3], KINDS[:1], KINDS[1:2]]
    passes = in_step([3, 1]).align(parts)  # batches of images and text that the other process has
    assert [(rows[0][0], is_own) for rows, is_own in passes] == [
        ("image", True),
        ("image", False),
        ("image", False),
        ("text", True),
        ("text", True),
    ]
    assert [rows for rows, is_own in passes if is_own] == [KINDS[1:2], KINDS[2:3], KINDS[:1]]


def test_a_process_without_rows_runs_as_many_as_the_other():
    assert [rows[0][0] for rows, _ in in_step([1, 2]).align([])] == ["image", "text", "text"]


def test_processes_that_do_not_depend_on_each_other_run_what_they_have():
    parts: list[Part] = [KINDS[:2]]
    world: Any = Two([9, 9])
    assert Parallel(world).align(parts) == [(KINDS[:2], True)]
