"""Documents in one row teach what they teach in rows of their own, in every model that can."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from peftkit.adapter import attach
from peftkit.errors import PeftkitError
from peftkit.forward.attention import training_attention
from peftkit.forward.blocks import Blocks
from peftkit.forward.padding_free import _places_in_row, num_positions
from peftkit.forward.probes import can_unpad
from peftkit.kernels.varlen import rounded_size
from peftkit.methods.lora import LoRA
from peftkit.methods.prefix import PrefixTuning
from peftkit.methods.prompt import PromptTuning
from peftkit.settings import DataConfig
from peftkit.tasks.batches import split_micro_batches
from peftkit.tasks.text.masked_lm import MaskedLM, MaskedLMConfig, MaskedRow
from peftkit.tasks.text.seq2seq import Seq2Seq, Seq2SeqConfig
from tests.helpers.families import ARCHITECTURES
from tests.helpers.hybrids import HYBRIDS
from tests.helpers.padding_free import (
    FIRST,
    MODELS,
    PACKED,
    ROWS,
    SHARED_PREFIXES,
    assert_same,
    row_of,
    task_on,
    with_prefix,
)

Tokenizer = PreTrainedTokenizerFast
CANNOT = ["mpt", "inkling", "qwen4_exp", "deepseek_v4", "glm_moe_dsa", "hy_v4"]
"""Attention with distances over the bounds of documents, or that chooses its keys."""
CAN = {
    *("llama", "qwen3", "gemma2", "gemma3_text", "mistral_swa", "olmo2", "phi3"),
    *("gpt2", "gpt_neox", "mixtral", "qwen3_moe", "gpt_oss", "mimo_v2_flash"),
    *HYBRIDS.keys() - CANNOT,
}
"""Known to be able to; others may be, and are held to the same."""
FAST = {"llama", "gemma2", "mistral_swa", "gpt2", "gpt_oss", "mpt", "qwen3_5", "lfm2"}
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", EACH)
def test_one_row_is_the_same_where_it_is_possible(name, tokenizer):
    model = MODELS[name]().eval()
    if not any(kind in type(model).__name__ for kind in ("CausalLM", "LMHead")):
        pytest.skip("is no causal language model")
    try:
        task = task_on(model, tokenizer)
    except PeftkitError:
        pytest.skip("is no causal language model either")
    with task.training(model):
        possible = task.paths["rows"] != "padded"
    assert possible or name not in CAN
    assert not possible or name not in CANNOT
    if possible:
        assert_same(task, model, ROWS)
        assert_same(task, model, SHARED_PREFIXES)
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_of_an_encoder_too(name, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.mask_token = "<unk>"
    model: Any = ARCHITECTURES[name]().eval()
    task = MaskedLM(model, own, MaskedLMConfig(), DataConfig(train="", max_length=64))
    rows = [MaskedRow(row.input_ids, tuple(range(len(row.input_ids))), "") for row in ROWS]
    assert_same(task, model, rows)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_rows_of_an_encoder_and_its_decoder_are_padded(name, tokenizer):
    model: Any = MODELS[name]().eval()
    task = Seq2Seq(model, tokenizer, Seq2SeqConfig(), DataConfig(train=""))
    with task.training(model):
        assert task.paths["rows"] == "padded"


def test_what_counts_positions_its_own_way_is_padded(tokenizer):
    model = ARCHITECTURES["roberta"]().eval()  # its first position is not the first
    with training_attention(model) as attention:
        assert attention is not None
        assert not can_unpad(model, attention, share=True)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_documents_that_share_rows_are_apart_too(name, tokenizer):
    model = ARCHITECTURES[name]().eval()
    task = task_on(model, tokenizer, packing=True)
    assert_same(task, model, PACKED)
    assert_same(task, model, [with_prefix(row_of(9, 11), FIRST, 5), *PACKED, *SHARED_PREFIXES])


@pytest.mark.parametrize("way", ["keep", "recompute"])
def test_recomputed_blocks_find_their_documents(way, tokenizer):
    model = ARCHITECTURES["llama"]().eval()
    adapter = attach(model, LoRA(rank=2))
    for parameter in adapter.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.train()
    blocks = Blocks(model)
    blocks.set_activations(way)
    assert_same(task_on(model, tokenizer), model, ROWS)
    assert_same(task_on(model, tokenizer), model, SHARED_PREFIXES)
    blocks.restore()


@pytest.mark.parametrize(
    "method", [PromptTuning(num_virtual_tokens=3), PrefixTuning(num_virtual_tokens=3)]
)
def test_virtual_tokens_before_every_row_need_rows(method):
    model = ARCHITECTURES["llama"]().eval()
    attach(model, method)
    with training_attention(model) as attention:
        assert attention is not None
        assert not can_unpad(model, attention, share=True)


def test_asking_leaves_the_model_and_the_generator_as_they_were(tokenizer):
    model: Any = ARCHITECTURES["gpt2"]().train()  # with dropout
    task = task_on(model, tokenizer)
    before, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    implementation = model.config._attn_implementation
    with task.training(model):
        assert task.paths["rows"].startswith("without padding")
    assert task.paths["rows"] == "padded"
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == implementation
    assert "grid_tokens" not in task.collate(ROWS)


def test_rows_of_one_length_stay_rows(tokenizer):
    model = ARCHITECTURES["llama"]()
    task = task_on(model, tokenizer)
    with task.training(model):
        assert "grid_tokens" not in task.collate([row_of(16), row_of(16)])
        assert "grid_tokens" not in task.collate([row_of(30)])
        assert "grid_tokens" in task.collate([row_of(16), row_of(30), row_of(5)])
        assert "grid_tokens" in task.collate([row_of(100, 100, 100)])  # attention alone is less


def test_micro_batches_count_tokens_and_some_of_the_padding(tokenizer):
    model = ARCHITECTURES["llama"]()
    task = task_on(model, tokenizer)
    padded = split_micro_batches(ROWS, task.num_positions, 8, 48)
    with task.training(model):
        in_one_row = split_micro_batches(ROWS, task.num_positions, 8, 48)
        assert task.num_positions(ROWS) < 4 * 25
    assert len(in_one_row) < len(padded)
    assert num_positions([7, 7]) == 14
    assert num_positions([100, 10]) == 110 + (100**2 - 10**2) // 1000


def test_sizes_are_few_and_little_is_lost():
    sizes = [rounded_size(size, 8, 16) for size in range(1, 2049)]
    assert all(0 <= found - size < max(8, size / 16) for size, found in enumerate(sizes, 1))
    assert all(found % 8 == 0 for found in sizes)
    assert len({size for size in sizes if 1024 < size <= 2048}) == 16


def trie_places(documents: list[list[int]], share: bool) -> list[list[int]]:
    """Number the nodes of a prefix trie in the order of their first token."""
    trie: dict[tuple[int, int], int] = {}  # (parent node, token) -> node
    places: list[list[int]] = [[] for _ in documents]
    for number in sorted(range(len(documents)), key=lambda n: -len(documents[n])):
        node = -1 if share else -1 - number
        for token in documents[number]:
            node = trie.setdefault((node, token), len(trie))
            places[number].append(node)
    return places


@pytest.mark.parametrize("share", [True, False])
def test_places_are_the_nodes_of_a_prefix_trie(share):
    draw = random.Random(0)
    for _ in range(500):
        stems = [draw.choices(range(3), k=draw.randrange(6)) for _ in range(3)]
        documents = [
            draw.choice(stems) + draw.choices(range(3), k=draw.randrange(1, 5))
            for _ in range(draw.randrange(1, 9))
        ]
        assert _places_in_row(documents, share=share) == trie_places(documents, share)
