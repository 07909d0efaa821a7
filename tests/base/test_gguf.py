"""GGUF files, tensor by tensor: the very weights that transformers' own loader makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from peftkit.base.build import build, cast
from peftkit.base.fingerprint import fingerprint
from peftkit.base.gguf_file import parsed_once
from peftkit.base.locate import Location
from peftkit.base.pretrained import quiet
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import request_of
from peftkit.quant.layers import packed_tensors
from peftkit.quant.quantize import quantize_model, stores_transposed
from peftkit.settings import BaseConfig
from tests.base.test_pack import state_of
from tests.helpers.families import ARCHITECTURES, VOCAB

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")

CPU = torch.device("cpu")
SEQ2SEQ = Purpose("seq2seq_lm", "AutoModelForSeq2SeqLM")
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "bloom": "bloom",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "t5": "t5_gated",
    "lfm2": "",
}
"""GGUF's name of an architecture to ours: maps of names alone, rows turned, values changed, halves
of stacks, two towers, and one (lfm2) that transformers converts by rules of another kind."""


FAST = ("llama", "gpt2", "qwen3moe", "lfm2")


def keys_of(architecture: str) -> dict[str, Any]:
    """Return what a GGUF file says of a tiny model of an architecture."""
    if architecture == "lfm2":
        sizes = {"block_count": 2, "embedding_length": 32, "feed_forward_length": 64}
        heads = {"attention.head_count": 4, "attention.head_count_kv": [0, 2]}
        others = {"context_length": 64, "shortconv.l_cache": 3, "rope.freq_base": 1e4}
        return {**sizes, **heads, **others, "attention.layer_norm_rms_epsilon": 1e-5}
    config = ARCHITECTURES[FAMILIES[architecture]]().config
    kind = config.model_type.removesuffix("_text")
    found = {}
    for key, field in GGUF_TO_TRANSFORMERS_MAPPING["config"][kind].items():
        value = 1e4 if field == "rope_theta" else getattr(config, field or "", None)
        if isinstance(value, int | float):
            found[key] = value
    return found


def new_writer(path: Path, architecture: str) -> Any:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("x")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    writer.add_pad_token_id(0)
    for key, value in keys_of(architecture).items():
        kinds = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        kinds.get(type(value), writer.add_bool)(f"{architecture}.{key}", value)
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_written(architecture: str, name: str, value: Tensor) -> Tensor:
    """Return a parameter in the shape that llama.cpp writes it in."""
    matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    if architecture == "gpt2" and value.ndim == 2 and any(m in name for m in matrices):
        return value.t()
    if "shortconv.conv" in name:
        return value[:, 0]
    return value[0] if "gate_inp_shexp" in name else value


def file_tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    """Return a model's parameters under the names that a GGUF file has them by."""
    kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    names = get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    state, found = model.state_dict(), {}
    for name, ours in names.items():
        value = state.get(ours)
        if value is None or (name == "output.weight" and model.config.tie_word_embeddings):
            continue
        if "_exps" in name:
            half = {"ffn_gate_exps": 0, "ffn_up_exps": 1}.get(name.split(".")[2])
            value, name = value if half is None else value.chunk(2, dim=1)[half], f"{name}.weight"
        found[name] = as_written(architecture, name, value)
    return found


def write_random(folder: Path, architecture: str, auto_class: str) -> Location:
    """Write random weights, as they are, under a GGUF file's names; matrices in 8 bits."""
    where = Location(str(folder / "x.gguf"), str(folder), gguf="x.gguf")
    writer = new_writer(where.gguf_path, architecture)
    output = torch.zeros(VOCAB, 32).numpy()
    if architecture in ("llama", "qwen3moe"):  # without it, the head is tied
        writer.add_tensor("output.weight", output)
    finish(writer)
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file="x.gguf")
    torch.manual_seed(0)
    model = getattr(transformers, auto_class).from_config(config)
    writer = new_writer(where.gguf_path, architecture)
    for name, value in file_tensors(architecture, model).items():
        numbers = value.float().contiguous().numpy()
        if value.ndim > 1 and value.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    finish(writer)
    return where


def by_transformers(where: Location, auto_class: str) -> Any:
    with quiet():
        model = getattr(transformers, auto_class).from_pretrained(
            where.source,
            gguf_file=where.gguf,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    return model.requires_grad_(False).eval()


def same(found: nn.Module, expected: nn.Module) -> None:
    left, right = state_of(found), state_of(expected)
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype, name
        assert torch.equal(left[name], tensor), name


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    """Compare every weight, blocks dequantised, with that of a dense model."""
    packed = {path: packing(data) for path, data, packing in packed_tensors(model)}
    dense = dict(model.named_parameters(remove_duplicate=False))
    for name, value in expected.named_parameters():
        path = name.removesuffix(".weight")
        own = packed.get(path, packed.get(name, dense.get(name)))
        assert own is not None, name
        owner = expected.get_submodule(name.rpartition(".")[0])
        turned = stores_transposed(owner, "weight") and path in packed
        assert torch.equal(own.t() if turned else own, value), name


@pytest.mark.parametrize(
    "architecture",
    [a if a in FAST else pytest.param(a, marks=pytest.mark.slow) for a in FAMILIES],
)
def test_every_architecture_loads_as_by_transformers(architecture, tmp_path) -> None:
    purpose = SEQ2SEQ if architecture == "t5" else CAUSAL_LM
    where = write_random(tmp_path, architecture, purpose.auto_class)
    with parsed_once(where):
        expected = by_transformers(where, purpose.auto_class)
        identity = fingerprint(expected)
        for settings in (
            BaseConfig(model="x", dtype="fp32"),
            BaseConfig(model="x", quantize="nf4", dtype="bf16"),
        ):
            request = request_of(settings, purpose, where, CPU)
            built = build(request)
            cast(expected, request.dtype)
            assert built.fingerprint == identity
            if settings.quantize == "none":
                has_blocks = any(packed_tensors(built.model))
                assert has_blocks == (architecture != "lfm2")
                assert_same_values(built.model, expected)
                continue
            quantize_model(expected, settings.quantize)
            same(built.model, expected)
