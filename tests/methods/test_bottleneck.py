"""Bottleneck adapters: where they sit in every architecture, what they compute, what they keep."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.adapter import Adapter, attach
from peftkit.errors import ConfigError, TargetError
from peftkit.methods.bottleneck import Bottleneck
from peftkit.model.blocks import blocks
from tests.helpers.cell import tiny_model as build
from tests.helpers.families import ARCHITECTURES
from tests.helpers.spread import spread

STYLES = ("houlsby", "pfeiffer", "parallel")
NUM_CROSS = {"t5": 2, "t5_gated": 2, "mt5": 2, "bart": 2, "pegasus": 2, "whisper": 2}
"""Blocks that attend twice, to themselves and to an encoder."""
NUM_BLOCKS = dict.fromkeys(NUM_CROSS, 4) | {"clip": 4, "llava": 4, "qwen2_vl": 4} | {
    "mllama": 5,
    "idefics": 6,
}  # fmt: skip
"""All others have two."""


def disturbed(adapter: Adapter) -> Adapter:
    """Give all trained tensors values that matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return adapter


# ------------------------------------------------------------------- places


@pytest.mark.parametrize("family", spread(ARCHITECTURES, 3))
def test_every_block_gets_what_its_style_says(family):
    with torch.device("meta"):
        model = ARCHITECTURES[family]()
    num_blocks = NUM_BLOCKS.get(family, 2)
    assert len(blocks(model)) == num_blocks
    sites = {style: [s.path for s in Bottleneck(style=style).sites(model)] for style in STYLES}
    assert len(set(sites["houlsby"])) == 2 * num_blocks + NUM_CROSS.get(family, 0)
    assert len(set(sites["pfeiffer"])) == num_blocks
    assert sites["parallel"] == sites["pfeiffer"]
    for block, _ in blocks(model):
        assert sum(path.startswith(f"{block}.") for path in sites["pfeiffer"]) == 1


@pytest.mark.parametrize(
    ("family", "targets", "count"),
    [
        ("t5", "blocks", 10),
        ("t5", "encoder", 4),
        ("t5", ("decoder", "encoder.block.0"), 8),
        ("llava", "vision", 4),
        ("llava", "language", 4),
        ("llava", ("language", "vision"), 8),
        ("llama", "layers.0", 2),
        ("llama", "layers.[01]", 4),
        ("llama", ("layers.1.mlp.down_proj", "layers.0"), 3),
        ("llama", "model.layers.*.self_attn.o_proj", 2),
    ],
)
def test_targets_are_blocks_sides_and_patterns(family, targets, count):
    with torch.device("meta"):
        model = ARCHITECTURES[family]()
    assert len(Bottleneck(style="houlsby", targets=targets).sites(model)) == count


def test_targets_that_are_not_there_are_refused_with_what_there_is():
    with torch.device("meta"):
        model = ARCHITECTURES["llama"]()
    with pytest.raises(TargetError, match=r"'layers.7', 'vision'") as error:
        Bottleneck(targets=("layers.0", "layers.7", "vision")).sites(model)
    assert "Its blocks: model.layers.0, model.layers.1." in str(error.value)
    with pytest.raises(TargetError, match=r"no block matches 'block' .*\n.*Did you mean 'blocks'"):
        Bottleneck(targets="block").sites(model)
    with pytest.raises(TargetError, match="no block matches no target"):
        Bottleneck(targets=()).sites(model)
    with pytest.raises(TargetError, match=r"no block matches 'layers.0.self_attn.o_proj'"):
        Bottleneck(targets="layers.0.self_attn.o_proj").sites(model)  # pfeiffer has none there
    with pytest.raises(TargetError, match="Linear has no blocks"):
        Bottleneck().sites(nn.Linear(3, 3))


@pytest.mark.parametrize("wrong", [{"size": 33}, {"reduction": 33}])
def test_a_width_that_does_not_fit_is_refused_by_name(wrong):
    (name, value), = wrong.items()  # fmt: skip
    with pytest.raises(TargetError, match=rf"{name} {value} does not fit .*down_proj"):
        attach(build("llama"), Bottleneck(**wrong))
    with pytest.raises(ConfigError):
        Bottleneck(**{name: 0})


# ------------------------------------------------------------------- the maths


def by_hand(module: nn.Module, x: Tensor, activation: Any = functional.relu) -> Tensor:
    """Return U f(D x + a) + b of an adapter."""
    inner = activation(x @ module.down_weight.T + module.down_bias)
    return inner @ module.up_weight.T + module.up_bias


def test_houlsby_on_a_block_of_llama_is_what_the_paper_says():
    model, x = build("llama"), torch.randn(2, 5, 32)
    block, bare = model.model.layers[0], copy.deepcopy(model.model.layers[0])
    disturbed(attach(model, Bottleneck(style="houlsby", size=9, activation="gelu")))
    after_attention, after_mlp = block.self_attn.o_proj, block.mlp.down_proj
    where = model.model.rotary_emb(x, torch.arange(5)[None])
    attended, _ = bare.self_attn(bare.input_layernorm(x), position_embeddings=where)
    x1 = x + attended + by_hand(after_attention, attended, functional.gelu)
    fed = bare.mlp(bare.post_attention_layernorm(x1))
    expected = x1 + fed + by_hand(after_mlp, fed, functional.gelu)
    torch.testing.assert_close(block(x, position_embeddings=where), expected)


@pytest.mark.parametrize("family", ["bert", "mixtral"])
def test_parallel_reads_the_input_of_the_feed_forward_part(family):
    model, x = build(family), torch.randn(2, 5, 32)
    stack = model.bert.encoder.layer if family == "bert" else model.model.layers
    bare = copy.deepcopy(stack[1])
    disturbed(attach(model, Bottleneck(style="parallel", size=9, scale=4.0, activation="tanh")))
    block = stack[1]
    if family == "bert":
        attended = bare.attention(x)[0]
        extra = 4 * by_hand(block.output.dense, attended, torch.tanh)
        fed = bare.output.dense(bare.intermediate(attended)) + extra
        actual, expected = block(x), bare.output.LayerNorm(fed + attended)
    else:
        expected = bare.mlp(x) + 4 * by_hand(block.mlp, x, torch.tanh)
        actual = block.mlp(x)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_takes_the_first_of_a_tuple_and_keeps_the_rest():
    model, x = build("gpt_oss"), torch.randn(2, 5, 32)
    bare = copy.deepcopy(model.model.layers[0].mlp)
    disturbed(attach(model, Bottleneck(size=9)))
    adapted = model.model.layers[0].mlp
    (out, scores), (before, scores_before) = adapted(x), bare(x)
    torch.testing.assert_close(out, before + by_hand(adapted, before))
    assert torch.equal(scores, scores_before)


# ------------------------------------------------------------------- what it cannot


def test_a_part_whose_input_is_not_known_has_no_parallel_adapter():
    model = build("bert")
    for layer in model.bert.encoder.layer:
        layer.intermediate.dense = nn.Bilinear(32, 32, 64)  # no linear layer of one input
    assert len(Bottleneck(style="pfeiffer").sites(model)) == 2
    with pytest.raises(TargetError, match=r"sublayer that ends in .*layer.0.output.dense"):
        Bottleneck(style="parallel").sites(model)
