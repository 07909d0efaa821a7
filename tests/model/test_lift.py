"""Wrappers are taken off a model and put back exactly."""

from typing import Any

import pytest
import torch

from peftkit.adapter import attach
from peftkit.methods.lora import LoRA
from peftkit.model.modes import lifted
from peftkit.model.places import unwrap_adapter
from tests.helpers.families import FAMILIES

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def modules(model: Any) -> list[tuple[str, int]]:
    return [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_lifted_model_is_its_base_and_comes_back(family):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    bare = modules(model)
    attach(model, LoRA(rank=2, targets="all-linear"))
    before = modules(model)
    with lifted(model):
        assert modules(model) == bare
        attach(model, LoRA(rank=3, targets="all-linear"), seed=1)
        assert modules(model) != bare
    assert modules(model) == before


def test_what_fails_within_leaves_the_adapter_on(llama):
    adapter = attach(llama, LoRA(rank=2, targets=("q", "v")))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.fill_(0.1)
    expected = llama(IDS).logits

    def fails() -> None:
        with lifted(llama):
            assert all(unwrap_adapter(module) is module for module in llama.modules())
            assert not torch.equal(llama(IDS).logits, expected)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert torch.equal(llama(IDS).logits, expected)
