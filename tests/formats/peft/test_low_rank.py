"""Adapters as matrices: what is read is what the modules apply, what is written loads anywhere."""

import math

import pytest
import torch

from peftkit.adapter import attach
from peftkit.errors import AdapterError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.low_rank import LowRank, read_low_rank, role_updates, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import logits, perturb
from tests.helpers.families import FAMILIES

METHODS = {
    "rslora-patterns": LoRA(
        rank=4, alpha=8, rslora=True, rank_pattern={"o": 2, "layers.1.mlp.up_proj": 1}
    ),
    "pissa": LoRA(rank=3, alpha=6, init="pissa"),
    "dora": DoRA(rank=3, alpha=6),
}


@pytest.mark.parametrize("name", METHODS)
def test_read_written_and_read_again_it_computes_the_same(name, tmp_path):
    model = FAMILIES["llama"]().eval()
    adapter = attach(model, METHODS[name])
    perturb(adapter.parameters())
    expected = logits(model)
    save_adapter(adapter, tmp_path / "one")
    file, modules = read_low_rank(tmp_path / "one")
    assert list(modules) == sorted(adapter.modules)
    for path, module in modules.items():
        a, b = adapter.modules[path].full_a(), adapter.modules[path].full_b()
        torch.testing.assert_close(module.delta(), adapter.modules[path].scaling * b @ a)
    save_low_rank(modules, tmp_path / "two", file.provenance)
    for notes in (True, False):
        if not notes:
            (tmp_path / "two" / "peftkit.json").unlink()
        adapter.detach()
        adapter = load_adapter(model, tmp_path / "two")
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)


def test_what_does_not_fit_is_listed_whole(tmp_path):
    module = LowRank(torch.ones(2, 4), torch.ones(6, 2), 1.0)
    save_low_rank({"a.q": module, "a.v": module}, tmp_path, Provenance())
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 2', '"r": 3'))
    (tmp_path / "peftkit.json").unlink()  # which would say that the config was changed
    with pytest.raises(AdapterError, match=r"misshapen: a\.q .*rank 3\n.*misshapen: a\.v"):
        read_low_rank(tmp_path)


def test_nothing_is_not_an_adapter(tmp_path):
    with pytest.raises(AdapterError, match="it has no layers"):
        save_low_rank({}, tmp_path, Provenance())


Q = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
UP = "model.layers.0.mlp.up_proj"


def test_norms_and_effective_ranks_are_those_of_the_matrices():
    ranks = {Q[0]: 3, Q[1]: 2, UP: 4}
    one = {p: LowRank(torch.randn(r, 9), torch.randn(12, r), 2.0) for p, r in ranks.items()}
    measured = {role.role: role for role in role_updates(one)}
    assert set(measured) == {"q", "up"}
    assert (measured["q"].num_layers, measured["q"].rank) == (2, 3)
    squares, effective = 0.0, []
    for path in Q:
        values = torch.linalg.svdvals(one[path].delta().double())
        squares += float(values.square().sum())
        shares = values[values > 1e-5] / values.sum()
        effective.append(math.exp(-float((shares * shares.log()).sum())))
    assert measured["q"].norm == pytest.approx(math.sqrt(squares), rel=1e-6)
    assert measured["q"].effective_rank == pytest.approx(sum(effective) / 2, rel=1e-4)


def test_effective_rank_is_between_one_and_the_rank():
    basis = torch.linalg.qr(torch.randn(12, 4))[0]
    equal = LowRank(torch.eye(4, 9), basis, 0.5)
    single = LowRank(torch.eye(4, 9), basis * torch.tensor([1, 1e-6, 1e-6, 1e-6]), 0.5)
    zero = LowRank(torch.zeros(1, 9), torch.zeros(12, 1), 1.0)
    for content, expected in ((equal, 4), (single, 1), (zero, 0)):
        (role,) = role_updates({UP: content})
        assert role.effective_rank == pytest.approx(expected, abs=1e-3)
