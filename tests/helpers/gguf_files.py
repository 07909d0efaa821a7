"""GGUF files as llama.cpp's converter writes them, with random weights or random blocks."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from peftkit.base.locate import Location
from peftkit.base.pretrained import quiet
from peftkit.base.purpose import Purpose
from peftkit.kernels.gguf_blocks import TYPES
from tests.helpers.families import ARCHITECTURES, VOCAB, tiny_tokenizer

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")
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


def dense_model(path: Path, auto_class: str = "AutoModelForCausalLM") -> Any:
    """Return the model that transformers makes of a GGUF file, in float32."""
    with quiet():
        model = getattr(transformers, auto_class).from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    return model.requires_grad_(False).eval()


def write_gguf(
    path: Path,
    model: transformers.LlamaForCausalLM,
    packed: Callable[[str, Tensor], tuple[Any, Any]] = lambda name, tensor: (tensor.numpy(), None),
) -> None:
    """Write a tiny Llama with its tokenizer as llama.cpp's converter does.

    Args:
        packed: Returns the data of a tensor and its type in ggml; by default float32.
    """
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB)
    tokenizer = tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    words = [tokenizer.convert_ids_to_tokens(index) for index in range(len(tokenizer))]
    words += [f"<unused{index}>" for index in range(VOCAB - len(words))]
    special = {word["content"] for word in backend["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in special else 1 for word in words])
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    for name in ("bos", "eos", "pad", "unk"):
        index = tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token"))
        getattr(writer, f"add_{name}_token_id")(index)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        if part in heads:  # llama.cpp turns the halves of each head into pairs
            tensor = tensor.view(heads[part], 2, -1, tensor.shape[1]).swapaxes(1, 2)
            tensor = tensor.reshape(-1, tensor.shape[-1])
        name = names.get_name(name, (".weight",))
        data, kind = packed(name, tensor.contiguous())
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)


HALVES = {  # where a block has its float16 numbers
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "mxfp4_gguf": (),
}


HOSTILE = (0x0000, 0x8000, 0x0001, 0x03FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E00)
"""0, -0, subnormals, the largest, infinities and NaN, as float16."""


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> Any:
    """Return rows of random blocks whose values are about as large as a model's."""
    rng, block = numpy.random.default_rng(seed), TYPES[kind]
    raw = rng.integers(0, 256, (rows, columns // block.values, block.num_bytes), numpy.uint8)
    for at in HALVES[kind]:
        scale = (rng.random(raw.shape[:2]) * 2e-4).astype(numpy.float16)
        raw[..., at : at + 2] = scale[..., None].view(numpy.uint8)
    if kind == "mxfp4_gguf":
        raw[..., 0] = rng.integers(118, 124, raw.shape[:2])
    return raw.reshape(rows, -1)


def bits(values: Tensor) -> Tensor:
    """Return the bits of float32 values; those of NaN differ between libraries."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


def hostile_rows(kind: str, rows: int, columns: int) -> Any:
    """Return rows of random bytes, the first ones with scales that are hard to compute with."""
    shape = random_rows(kind, rows, columns).shape
    raw = numpy.random.default_rng(1).integers(0, 256, shape, numpy.uint8)
    blocks = raw.reshape(rows, -1, TYPES[kind].num_bytes)
    for row, half in enumerate(HOSTILE):
        for at in HALVES[kind]:
            blocks[row, :, at : at + 2] = numpy.array([half], numpy.uint16).view(numpy.uint8)
    return raw


def blocks_of_all_kinds() -> Iterator[tuple[str, Tensor]]:
    """Yield each kind with 41 rows of two blocks, random ones and hostile ones."""
    for kind, block in TYPES.items():
        for make in (random_rows, hostile_rows):
            yield kind, torch.from_numpy(make(kind, 41, 2 * block.values))


MIXTURE = dict.fromkeys(("token_embd", "attn_v", "ffn_down"), "q6_k")
MIXTURE |= {"ffn_gate": "q5_k", "attn_output": "q8_0"}
"""Of a Q4_K_M file, more or less: all other matrices are in q4_k."""


def config_of_a_small_llama() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": VOCAB}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=64)


def number_of(kind: str) -> Any:
    return gguf.GGMLQuantizationType(TYPES[kind].number)


def in_blocks(name: str, tensor: Tensor) -> tuple[Any, Any]:
    """Return random blocks for a matrix, of a type by its name; vectors as they are."""
    if tensor.ndim < 2:
        return tensor.numpy(), None
    kind = next((kind for part, kind in MIXTURE.items() if part in name), "q4_k")
    seed = sum(name.encode())
    return random_rows(kind, *tensor.shape, seed=seed), number_of(kind)
