"""Generation faster than token by token as the model is: the same answers, and nothing is left."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from peftkit.adapter import Adapter, attach
from peftkit.inference import ready
from peftkit.inference.generate import generate_ids
from peftkit.inference.open_engine import open_engine, why_plain
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_linear import LoRALinear
from peftkit.quant.layers import packed_tensors
from peftkit.quant.quantize import quantize_model
from tests.helpers.families import ARCHITECTURES, FAMILIES
from tests.helpers.hybrids import FURTHER
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card

MODELS = {**ARCHITECTURES, **FURTHER}
Tokenizer = PreTrainedTokenizerFast
COMMON = [11, 45, 200, 7, 90, 33, 34, 35, 36]
PROMPTS = [[*COMMON, *rest] for rest in ([9, 41, 77, 130], [55], [33, 8, 99, 120, 61], [17, 18])]


def adapted(model: nn.Module, rank: int = 3) -> Adapter:
    adapter = attach(model, LoRA(rank=rank, alpha=6))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return adapter


def groups_of(model: nn.Module) -> set[bool | None]:
    """Return whether layers are grouped to serve, or to train, or not."""
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    return {getattr(layer.group, "serves", None) for layer in layers}


@pytest.mark.parametrize(("name", "kind"), [("llama", "nf4"), ("qwen3_moe", "none")])
def test_prepared_layers_compute_the_same(name, kind, tokenizer, monkeypatch):
    model: Any = MODELS[name]().eval()
    if kind != "none":
        quantize_model(model, kind)
    adapter = adapted(model)
    assert why_plain(model, tokenizer) is None  # which it is asked as it is
    seen: list[set[bool | None]] = []
    watch = model.register_forward_pre_hook(lambda *_: seen.append(groups_of(model)))
    adapted_ids = generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7)
    watch.remove()
    assert all(True in kinds for kinds in seen)
    assert groups_of(model) == {None}
    with adapter.disabled():
        bare = generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7)
    monkeypatch.setattr(ready, "prepared_for_serving", lambda *_: nullcontext())
    assert adapted_ids == generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7)
    assert adapted_ids != bare
    with adapter.disabled():
        assert bare == generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7)


def test_generating_within_training_leaves_its_groups(tokenizer):
    model: Any = FAMILIES["llama"]().train()
    adapter = adapted(model)
    before = generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7)
    adapter.prepare_training()
    assert generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7) == before
    assert groups_of(model) == {False}
    with torch.no_grad():  # what is ready for tokens follows the adapter too
        for parameter in adapter.parameters():
            parameter.add_(0.3)
    after = generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7)
    adapter.end_training()
    assert after == generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7) != before


@pytest.mark.parametrize("memory", ["enough", "little", "runs out"])
def test_a_card_with_room_decodes_with_unpacked_weights(tokenizer, memory):
    """Copies are bit-equal to the weights, and the first to go when memory runs out."""
    model: Any = FAMILIES["llama"]().eval()
    quantize_model(model, "nf4")
    adapted(model)
    expected = generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7)
    packings = [packing for _, _, packing in packed_tensors(model)]
    seen: list[bool] = []

    def watch(*_: Any) -> None:
        seen.append(all(packing.unpacked is not None for packing in packings))
        if memory == "runs out" and len(seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    copies = sum(packing.unpacked_bytes for packing in packings)
    num_bytes = sum(tensor.nbytes for tensor in model.parameters())
    with simulated(Card(memory=num_bytes + 4 * copies) if memory == "little" else Card()):
        model.to("cuda")
        assert why_plain(model, tokenizer) is None
        handle = model.register_forward_pre_hook(watch)
        assert generate_ids(model, tokenizer, PROMPTS, max_new_tokens=7) == expected
        handle.remove()
        with open_engine(model, tokenizer) as engine:
            assert engine.limits.rows == 64, "fewer rows, though copies were left to drop"
        assert not any(packing.unpacked is not None for packing in packings)
    assert seen[0] == (memory != "little")
    assert seen[-1] == (memory == "enough")
