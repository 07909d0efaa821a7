"""Two runs are the same run if nothing that their numbers depend on differs."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from peftkit.config.schema import flat
from peftkit.errors import CheckpointError
from peftkit.execution import rng
from peftkit.settings import TrainConfig
from peftkit.train.resume import UNBOUND, check_same_run, fingerprint, identity_of
from tests.helpers.toy import Row, Toy, ToyTask, make_rows, step_of


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([(1, 2), (3,)], [(1,), (2, 3)]),
        ([(1, 2)], [(2, 1)]),
        ([[1]], [["1"]]),
        ([[1]], [[1.0]]),
        ([[True]], [[1]]),
        ([("ab", "c")], [("a", "bc")]),
        ([], [()]),
        ([{"a": 1}], [{"a": 2}]),
        ([torch.tensor([1, 2])], [torch.tensor([1, 3])]),
    ],
)
def test_different_rows_have_different_fingerprints(a, b):
    assert fingerprint(a) != fingerprint(b)


def test_a_fingerprint_depends_on_what_is_learnt_and_not_on_where_it_came_from():
    rows = make_rows(3)
    moved = [dataclasses.replace(row, source="elsewhere") for row in rows]
    edited = [*rows[:2], dataclasses.replace(rows[2], labels=(*rows[2].labels[:-1], 9))]
    assert fingerprint(moved) == fingerprint(rows)
    assert fingerprint(edited) != fingerprint(rows)
    assert fingerprint(rows[::-1]) != fingerprint(rows)


def test_the_identity_has_the_settings_that_are_not_free_and_what_the_caller_adds():
    run = step_of(Toy(), ToyTask()).run
    identity = identity_of(run, {"data": {"files": ("a", "b")}})
    assert set(identity["train"]) | UNBOUND == set(TrainConfig.model_fields)
    assert not set(identity["train"]) & UNBOUND
    assert identity["data"] == {"files": ["a", "b"]}
    assert identity["num_processes"] == 1


def test_nested_keys_are_named_by_dots():
    assert flat({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "a.c": {}, "d": None}


def test_a_key_that_only_begins_like_an_allowed_one_is_not_allowed():
    with pytest.raises(CheckpointError, match="base_model: 1 -> 2"):
        check_same_run({"base_model": 1}, {"base_model": 2}, ["base"])
    assert check_same_run({"base": {"x": 1}}, {"base": {}}, ["base"]) != []


def test_generators_go_on_from_where_they_were_captured():
    device = torch.device("cpu")

    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(())),
        ]

    rng.seed_everything(3)
    draw()  # leaves the second half of a pair of gaussians behind, in python and in numpy
    state = rng.capture(device)
    first = draw()
    rng.restore({name: tensor.clone() for name, tensor in state.items()}, device)
    assert draw() == first


def test_every_process_draws_its_own_numbers():
    drawn = []
    for rank in range(3):
        rng.seed_everything(3, rank)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert len({value for values in drawn for value in values}) == 9


def test_a_row_may_be_hashed_whatever_it_holds():
    assert fingerprint([Row((1,), (2,), "x"), {"pixels": torch.zeros(2, 2)}, None, 1.5])
