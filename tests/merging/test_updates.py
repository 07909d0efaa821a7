"""Norms and effective ranks are those of the whole matrices, taken from the factors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from peftkit.formats.peft.low_rank import LowRank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.updates import role_updates

Q = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
UP = "model.layers.0.mlp.up_proj"


def test_norms_and_effective_ranks_are_those_of_the_matrices(tmp_path: Path) -> None:
    ranks = {Q[0]: 3, Q[1]: 2, UP: 4}
    one = {p: LowRank(torch.randn(r, 9), torch.randn(12, r), 2.0) for p, r in ranks.items()}
    save_low_rank(one, tmp_path, Provenance())
    found = {role.role: role for role in role_updates(tmp_path)}
    assert set(found) == {"q", "up"}
    assert (found["q"].num_layers, found["q"].rank) == (2, 3)
    squares, effective = 0.0, []
    for path in Q:
        values = torch.linalg.svdvals(one[path].delta().double())
        squares += float(values.square().sum())
        shares = values[values > 1e-5] / values.sum()
        effective.append(math.exp(-float((shares * shares.log()).sum())))
    assert found["q"].norm == pytest.approx(math.sqrt(squares), rel=1e-6)
    assert found["q"].effective_rank == pytest.approx(sum(effective) / 2, rel=1e-4)


def test_effective_rank_is_between_one_and_the_rank(tmp_path: Path) -> None:
    basis = torch.linalg.qr(torch.randn(12, 4))[0]
    equal = LowRank(torch.eye(4, 9), basis, 0.5)
    single = LowRank(torch.eye(4, 9), basis * torch.tensor([1, 1e-6, 1e-6, 1e-6]), 0.5)
    zero = LowRank(torch.zeros(1, 9), torch.zeros(12, 1), 1.0)
    for content, expected in ((equal, 4), (single, 1), (zero, 0)):
        save_low_rank({UP: content}, tmp_path, Provenance())
        (role,) = role_updates(tmp_path)
        assert role.effective_rank == pytest.approx(expected, abs=1e-3)
