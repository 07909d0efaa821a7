"""Blocks whose inputs are kept elsewhere: the same gradients, and nothing of them stays behind."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.adapter import attach
from peftkit.forward.blocks import Blocks
from peftkit.forward.offload import Offload, OffloadedInput
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import gradients as gradients_of
from tests.helpers.families import FAMILIES
from tests.helpers.toy import same

IDS = torch.arange(36).remainder(23).view(3, 12) + 3


def gradients(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    for ids in (IDS, IDS[:1, :7]):  # two micro-batches
        model(input_ids=ids, labels=ids).loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("way", ["selective", "recompute", "offload"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_gradients_are_those_of_activations_that_are_kept(family, way):
    torch.manual_seed(0)
    model = FAMILIES[family]().train()
    attach(model, LoRA(rank=3, dropout=0.2))
    for config in (model.config, getattr(model, "decoder", model).config):
        config.use_cache = False  # T5's decoder has a config of its own
    gradients(model)  # the first pass finds out which layers read one input
    kept, blocks = gradients(model), Blocks(model)
    blocks.set_activations(way)
    assert kept
    assert same(gradients(model), kept)
    blocks.restore()


def test_nothing_below_the_lowest_adapter_is_computed_again():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().train()
    attach(model, LoRA(rank=3, targets="model.layers.1.mlp.*"))
    calls = []
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_hook(lambda *_, number=number: calls.append(number))
    Blocks(model).set_activations("offload")
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert calls == [0, 1, 1]


def chain(num_blocks: int) -> tuple[list[weakref.ref[Tensor]], Tensor]:
    """Run blocks one after the other; return what each was given, and the output."""
    offload, given = Offload(), []

    def run(x: Tensor, factor: Tensor) -> Tensor:
        return torch.tanh(x * factor)

    hidden, factor = torch.ones(2, 3, requires_grad=True) * 1, torch.tensor(0.9)
    for _ in range(num_blocks):
        given.append(weakref.ref(hidden))
        hidden = offload(run, hidden, factor)
    return given, hidden


def test_inputs_are_let_go_in_the_forward_pass():
    given, hidden = chain(4)
    assert [ref() is not None for ref in given] == [False] * 4
    assert hidden.requires_grad


def test_the_input_of_the_block_before_is_fetched_ahead_and_never_more(monkeypatch):
    parcels: list[weakref.ref[OffloadedInput]] = []
    begin, take, waiting = OffloadedInput.__init__, OffloadedInput.take, []

    def noted(self: OffloadedInput, *args: Any) -> None:
        begin(self, *args)
        parcels.append(weakref.ref(self))

    def counted(self: OffloadedInput) -> Tensor:
        taken = take(self)
        alive = [parcel for ref in parcels if (parcel := ref()) is not None]
        waiting.append([parcel._fetched is not None for parcel in alive])
        return taken

    monkeypatch.setattr(OffloadedInput, "__init__", noted)
    monkeypatch.setattr(OffloadedInput, "take", counted)
    _, hidden = chain(3)
    assert waiting == [[False], [False] * 2, [False] * 3]
    waiting.clear()
    hidden.sum().backward()
    assert [sum(fetched) for fetched in waiting] == [1, 1, 0]
    del hidden
    assert not any(ref() is not None for ref in parcels)


def test_without_gradients_a_block_is_simply_computed():
    with torch.no_grad():
        given, hidden = chain(2)
    assert not hidden.requires_grad
    assert [ref() is not None for ref in given] == [False] * 2
