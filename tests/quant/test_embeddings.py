"""The embedding and the output layer in 4 and 8 bits: the same rows, and less of them in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peftkit.base.load import load_base
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import DTYPES
from peftkit.base.skeleton import packed_skeleton, weight_bytes
from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError
from peftkit.execution.environment import gpu_of_size
from peftkit.kernels import packed as kernel
from peftkit.kernels.packed import slices_of, unpack, unpack_rows
from peftkit.planning.memory import MemoryEstimator
from peftkit.quant.layers import QuantizedLinear, pack
from peftkit.quant.quantize import QuantizedEmbedding, quantize_model
from peftkit.recipe import Recipe
from peftkit.settings import BaseConfig
from tests.helpers.families import ARCHITECTURES, tiny_tokenizer
from tests.helpers.hybrids import FURTHER

KINDS = ("nf4", "fp4", "int8")
SEQ2SEQ = Purpose("seq2seq_lm", "AutoModelForSeq2SeqLM")
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
def test_rows_and_slices_match_the_whole_matrix_bit_for_bit(kind, double_quant, monkeypatch):
    weight = torch.randn(1030, 128)
    data, packing = pack(weight, kind, double_quant=double_quant)
    packed = packing.weight(data)
    whole = unpack(packed, torch.float32)
    rows = torch.tensor([[0, 5, 1029], [5, 700, 64]])
    assert torch.equal(unpack_rows(packed, torch.float32, rows), whole[rows])
    monkeypatch.setattr(kernel, "SLICE_SIZE", 256 * 128)
    slices = list(slices_of(packed))
    assert len(slices) > 3
    found = torch.cat([unpack(rows, torch.float32) for rows in slices])
    assert torch.equal(found, whole)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_model_says_what_it_says_with_the_dequantised_tables(folder, kind):
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


@pytest.mark.parametrize(
    ("family", "purpose"),
    [
        ("t5", SEQ2SEQ),  # plain tables of encoder and decoder over one weight
        ("bart", SEQ2SEQ),  # scaled ones
        ("pegasus", SEQ2SEQ),
        ("marian", SEQ2SEQ),
        ("m2m_100", SEQ2SEQ),
        ("gemma2", CAUSAL_LM),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_shared_tables_are_packed(family, purpose, dtype, tmp_path):
    torch.manual_seed(0)
    (ARCHITECTURES | FURTHER)[family]().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    more = {"purpose": purpose, "dtype": dtype, "quantize": "int8"}
    packed, dense = opened(tmp_path, "int8", **more), opened(tmp_path, "none", **more)
    inputs = {"input_ids": IDS}
    if dense.model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS.flip(1)
    table, head = packed.model.get_input_embeddings(), packed.model.get_output_embeddings()
    assert isinstance(table, QuantizedEmbedding)
    with torch.no_grad():
        dense.model.get_input_embeddings().weight.copy_(table.weight)
        dense.model.get_output_embeddings().weight.copy_(head.weight)
        found, expected = packed.model(**inputs).logits, dense.model(**inputs).logits
    # in bf16 the head's product is made in pieces, which sum in another order
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert packed.audit.num_bytes < dense.audit.num_bytes
    settings = BaseConfig(model="x", quantize="int8", quantize_embeddings="int8")
    how = packed.model.config, settings, purpose, DTYPES[dtype]
    assert weight_bytes(*how) == sum(p.nbytes for p in packed.model.parameters())
    assert packed_skeleton(*how).get_input_embeddings().scale == table.scale


def test_a_table_that_something_else_reads_too_stays_as_it_is():
    model = ARCHITECTURES["gemma2"]()

    class Doubled(torch.nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    other = Doubled(*model.get_input_embeddings().weight.shape)
    other.weight = model.get_input_embeddings().weight
    model.other = other
    quantize_model(model, "int8", embeddings="int8")
    assert model.get_input_embeddings().weight.is_floating_point()
    assert model.get_output_embeddings().weight is other.weight


def test_skeleton_and_plan_have_the_same_bytes(folder):
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
def test_what_needs_the_table_as_it_is_refuses_it(base, told):
    given = {"model": "x", "quantize": "nf4", "quantize_embeddings": "int8", **base}
    with pytest.raises(ConfigError, match=told):
        from_dict(Recipe, {"base": given, "data": {"train": "rows.jsonl"}}, "test")
