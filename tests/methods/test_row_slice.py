"""Rows of some roles of a fused layer, as they are trained and as they are in a file."""

import pytest
import torch
from torch import nn

from peftkit.errors import AdapterError
from peftkit.methods.ia3 import IA3
from peftkit.model.targets import RowSlice, Site

ROWS = {"q": torch.tensor([0, 1, 2]), "v": torch.tensor([6, 8])}
FUSED = RowSlice(Site("attn.qkv", ("q", "v"), ROWS), 9, None, rank=2)


def test_a_vector_of_some_rows_comes_back_from_one_of_all_rows():
    adapted = torch.arange(1.0, 6.0)
    full = FUSED.spread(adapted, fill=1.0)
    assert full.tolist() == [1, 2, 3, 1, 1, 1, 4, 1, 5]
    assert torch.equal(FUSED.take(full, fill=1.0), adapted)


@pytest.mark.parametrize("lead", [(), (3,)], ids=["layer", "experts"])
def test_each_role_has_columns_of_its_own(lead):
    adapted = torch.rand(*lead, 5, 2) + 1
    full = FUSED.spread_matrix(adapted)
    assert full.shape == (*lead, 9, 4)
    assert torch.equal(full[..., :3, :2], adapted[..., :3, :])
    assert torch.equal(full[..., [6, 8], 2:], adapted[..., 3:, :])
    assert full.count_nonzero() == adapted.count_nonzero()
    assert torch.equal(FUSED.take_matrix(full), adapted)


def test_values_of_other_roles_are_refused_by_the_name_of_the_layer():
    with pytest.raises(AdapterError, match=r"attn\.qkv"):
        FUSED.take(torch.full((9,), 2.0), fill=1.0)
    with pytest.raises(AdapterError, match=r"attn\.qkv"):
        FUSED.take_matrix(torch.ones(9, 4))


def test_an_adapter_kept_in_fewer_bits_than_its_file_loads():
    layer = IA3(dtype="bf16").wrap(nn.Linear(4, 4), Site("attn.q", ("q",)))
    layer.load({"ia3_l": torch.tensor([[1.0001], [1.5], [1.0], [2.0]])})  # 1.0001 becomes one
    assert layer.ia3_l.tolist() == [1.0, 1.5, 1.0, 2.0]
