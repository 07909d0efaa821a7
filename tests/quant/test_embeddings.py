"""The embedding and the output layer in 4 and 8 bits: the same rows, and less of them in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peftkit.base.load import load_base
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.skeleton import packed_skeleton, weight_bytes
from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError
from peftkit.execution.environment import gpu_of_size
from peftkit.kernels import packed as kernel
from peftkit.kernels.packed import slices_of, unpack, unpack_rows
from peftkit.planning.memory import MemoryEstimator
from peftkit.quant.layers import QuantizedEmbedding, QuantizedLinear, pack
from peftkit.recipe import Recipe
from peftkit.settings import BaseConfig
from tests.families import tiny_tokenizer

KINDS = ("nf4", "fp4", "int8")
IDS = torch.tensor([[3, 9, 3, 41], [0, 7, 11, 13]])


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("base")
    tokenizer = tiny_tokenizer()
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=max(len(tokenizer), 256),
        tie_word_embeddings=request.param,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found


def opened(folder: Path, embeddings: str, **more: Any) -> Any:
    given = {"quantize": "nf4", "dtype": "fp32", "store": "off", **more}
    return load_base(str(folder), quantize_embeddings=embeddings, **given)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_pieces_are_those_of_the_whole_matrix_to_the_bit(
    kind: str, double_quant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(1030, 128)
    data, packing = pack(weight, kind, double_quant=double_quant)
    how = packing.scales, packing.form
    whole = unpack(data, *how, torch.float32)
    rows = torch.tensor([[0, 5, 1029], [5, 700, 64]])
    assert torch.equal(unpack_rows(data, *how, torch.float32, rows), whole[rows])
    monkeypatch.setattr(kernel, "SLICE_SIZE", 256 * 128)
    slices = list(slices_of(data, *how))
    assert len(slices) > 3
    found = torch.cat([unpack(*rows, torch.float32) for rows in slices])
    assert torch.equal(found, whole)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_model_says_what_it_says_with_the_dequantised_tables(folder: Path, kind: str) -> None:
    packed, dense = opened(folder, kind), opened(folder, "none")
    model, plain = packed.model, dense.model
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, QuantizedEmbedding)
    assert isinstance(head, QuantizedLinear)
    is_tied = plain.config.tie_word_embeddings
    assert (table.packed is head.packed) == is_tied
    with torch.no_grad():
        plain.get_input_embeddings().weight.copy_(table.weight)
        plain.get_output_embeddings().weight.copy_(head.weight)
        assert torch.allclose(model(IDS).logits, plain(IDS).logits, atol=1e-5)
    assert packed.fingerprint == dense.fingerprint
    rows = {row.kind: row for row in packed.audit.rows}
    assert rows["embeddings"].stored == kind
    assert packed.audit.num_parameters == dense.audit.num_parameters
    saved = dense.audit.num_bytes - packed.audit.num_bytes
    tables = (1 if is_tied else 2) * table.num_embeddings * 64
    assert saved > tables * (4 - 1.2)


def test_skeleton_and_plan_have_the_same_bytes(folder: Path) -> None:
    model = opened(folder, "int8").model
    settings = BaseConfig(model="x", quantize="nf4", quantize_embeddings="int8")
    how = model.config, settings, CAUSAL_LM, torch.float32
    expected = sum(p.nbytes for p in model.parameters())
    assert sum(p.nbytes for p in packed_skeleton(*how).parameters()) == expected
    assert weight_bytes(*how) == expected
    given = {
        "base": {"model": str(folder), "quantize": "nf4", "quantize_embeddings": "int8"},
        "data": {"train": "", "max_length": 16},
        "train": {"batch_size": 1, "gradient_checkpointing": True},
    }
    recipe = from_dict(Recipe, given | {"base": {**given["base"], "dtype": "fp32"}}, "test")
    estimator = MemoryEstimator(recipe, model.config, gpu_of_size(10**9))
    assert estimator.steps.weights == expected


@pytest.mark.parametrize(
    ("base", "told"),
    [({"quantize": "none"}, "quantize is none"), ({"new_tokens": ["<a>"]}, "trains rows of it")],
)
def test_what_needs_the_table_as_it_is_refuses_it(base: dict[str, Any], told: str) -> None:
    given = {"model": "x", "quantize": "nf4", "quantize_embeddings": "int8", **base}
    with pytest.raises(ConfigError, match=told):
        from_dict(Recipe, {"base": given, "data": {"train": "rows.jsonl"}}, "test")
