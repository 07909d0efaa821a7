"""The parts of the GPU benchmark that need no GPU: FLOP, shares, and the search for a length."""

import pytest
import torch
from torch import nn

from benchmarks import gpu, shapes
from peftkit.adapter import attach
from peftkit.methods.lora import LoRA
from tests.helpers.families import TINY


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> shapes.Shape:
    shape = shapes.Shape("LlamaForCausalLM", "LlamaConfig", {**TINY, "pad_token_id": 0})
    monkeypatch.setitem(shapes.LARGE, "tiny", shape)
    return shape


def test_parameters_are_those_of_the_model(tiny):
    model = shapes.build(tiny)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert shapes.matmul_parameters(tiny) == sum(linear.weight.numel() for linear in linears)
    assert shapes.adapter_parameters(tiny, 5) == attach(model, LoRA(rank=5)).num_trainable


def test_the_arithmetic_of_a_released_model_is_the_published_one():
    flop = shapes.lora_flop(shapes.LARGE["llama-3.1-8b"], 4096, 16)
    assert flop == pytest.approx(33.5e9, rel=0.005)  # 34.0e9 with flash attention's 3.5 a
    share = gpu.share_of_peak("llama-3.1-8b", 4096, 16, 12_000, 989)
    assert share == pytest.approx(0.406, abs=0.002)


@pytest.mark.parametrize("room", [0, 2047, 2048, 5000, 78_475, 399_999, 10**9])
def test_the_longest_row_under_a_cap_is_found_within_a_step(room):
    tried: list[int] = []

    def fits(length: int) -> bool:
        tried.append(length)
        return length <= room

    found = gpu.longest(fits, 2048, 400_000, 4096)
    assert found <= room
    assert max(tried) <= 400_000 + 4096
    assert len(tried) == len(set(tried)) < 16
    if room >= 2048:
        assert found in tried
        assert min(room, 400_000) - found <= 4096
    else:
        assert found == 0


def test_a_model_made_block_by_block_computes(tiny):
    seen: list[nn.Module] = []
    model = shapes.build(tiny, dtype=torch.bfloat16, each_block=seen.append)
    assert len(seen) == len(model.model.layers) == model.config.num_hidden_layers == 3
    assert [block.self_attn.layer_idx for block in model.model.layers] == [0, 1, 2]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert model(torch.arange(7)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4060", None),
    ],
)
def test_a_rate_is_that_of_the_named_card_alone(name, rate):
    assert gpu.peak_of(name) == rate
