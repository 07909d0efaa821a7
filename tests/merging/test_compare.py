"""Norms, effective ranks and cosines are those of the whole matrices, taken from the factors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peftkit.data.encode import Style
from peftkit.errors import AdapterError
from peftkit.formats.peft.low_rank import LowRank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.compare import compare, role_updates

Q = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
UP = "model.layers.0.mlp.up_proj"


def update(rank: int, shape: tuple[int, int] = (12, 9), scaling: float = 2.0) -> LowRank:
    return LowRank(torch.randn(rank, shape[1]), torch.randn(shape[0], rank), scaling)


@pytest.fixture
def one() -> dict[str, LowRank]:
    return {Q[0]: update(3), Q[1]: update(2), UP: update(4, (20, 9))}


def test_norms_and_effective_ranks_are_those_of_the_matrices(
    one: dict[str, LowRank], tmp_path: Path
) -> None:
    save_low_rank(one, tmp_path, Provenance())
    found = {role.role: role for role in role_updates(tmp_path)}
    assert set(found) == {"q", "up"}
    assert (found["q"].num_layers, found["q"].rank) == (2, 3)
    squares, ranks = 0.0, []
    for path in Q:
        values = torch.linalg.svdvals(one[path].delta().double())
        squares += float(values.square().sum())
        shares = values[values > 1e-5] / values.sum()
        ranks.append(math.exp(-float((shares * shares.log()).sum())))
    assert found["q"].norm == pytest.approx(math.sqrt(squares), rel=1e-6)
    assert found["q"].effective_rank == pytest.approx(sum(ranks) / 2, rel=1e-4)


def test_effective_rank_is_between_one_and_the_rank(tmp_path: Path) -> None:
    basis = torch.linalg.qr(torch.randn(12, 4))[0]
    equal = LowRank(torch.eye(4, 9), basis, 0.5)
    single = LowRank(torch.eye(4, 9), basis * torch.tensor([1, 1e-6, 1e-6, 1e-6]), 0.5)
    zero = LowRank(torch.zeros(1, 9), torch.zeros(12, 1), 1.0)
    for content, expected in ((equal, 4), (single, 1), (zero, 0)):
        save_low_rank({UP: content}, tmp_path, Provenance())
        (role,) = role_updates(tmp_path)
        assert role.effective_rank == pytest.approx(expected, abs=1e-3)


def test_two_adapters_are_compared_role_by_role(one: dict[str, LowRank], tmp_path: Path) -> None:
    other = {Q[0]: update(5), Q[1]: replace(one[Q[1]], scaling=0.5)}
    origin = Provenance("tiny", fingerprint="sha256:1", prompt_style=Style("chat"))
    save_low_rank(one, tmp_path / "one", origin)
    save_low_rank(other, tmp_path / "other", replace(origin, fingerprint="sha256:2"))
    found = compare(tmp_path / "one", tmp_path / "other")
    pairs = [(one[path].delta().double(), other[path].delta().double()) for path in Q]
    inner = sum(float((a * b).sum()) for a, b in pairs)
    lengths = [math.sqrt(sum(float(p[i].square().sum()) for p in pairs)) for i in (0, 1)]
    roles = {role.role: role for role in found.roles}
    q, up = roles["q"], roles["up"]
    assert (q.role, q.num_layers) == ("q", (2, 2))
    assert q.norm == pytest.approx(lengths, rel=1e-6)
    assert q.cosine == pytest.approx(inner / lengths[0] / lengths[1], rel=1e-5)
    assert (up.num_layers, up.norm[1], up.cosine) == ((1, 0), 0.0, None)
    whole = math.hypot(lengths[0], float(one[UP].delta().norm()))
    assert found.all.cosine == pytest.approx(inner / whole / lengths[1], rel=1e-5)
    assert found.facts["fingerprint"] == ("sha256:1", "sha256:2")
    assert found.facts["rank"] == ("2, 3, 4", "2, 5")
    assert found.facts["roles"] == ("up, q", "q")
    assert not found.same


def test_an_adapter_is_the_same_as_itself_and_opposite_to_its_negative(
    one: dict[str, LowRank], tmp_path: Path
) -> None:
    save_low_rank(one, tmp_path / "one", Provenance())
    negative = {path: replace(u, b=-u.b) for path, u in one.items()}
    save_low_rank(negative, tmp_path / "negative", Provenance())
    itself = compare(tmp_path / "one", tmp_path / "one")
    assert itself.same
    assert [role.cosine for role in itself.roles] == pytest.approx([1, 1])
    opposite = compare(tmp_path / "one", tmp_path / "negative")
    assert not opposite.same
    assert [role.cosine for role in opposite.roles] == pytest.approx([-1, -1])


def test_other_shapes_have_no_cosine(one: dict[str, LowRank], tmp_path: Path) -> None:
    save_low_rank(one, tmp_path / "one", Provenance())
    save_low_rank({Q[0]: update(3, (12, 7))}, tmp_path / "other", Provenance())
    found = compare(tmp_path / "one", tmp_path / "other")
    q = next(role for role in found.roles if role.role == "q")
    assert q.cosine is None
    assert q.norm[1] > 0


def test_an_adapter_of_another_kind_is_refused(one: dict[str, LowRank], tmp_path: Path) -> None:
    save_low_rank(one, tmp_path, Provenance())
    config = tmp_path / "adapter_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "peft_type": "XYZ"}))
    with pytest.raises(AdapterError, match="'XYZ'"):
        compare(tmp_path, tmp_path)
