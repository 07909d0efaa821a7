"""A transformers model as llama.cpp's converter writes it, by hand: names, order of rows, types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

from peftkit.formats.exchange import import_adapter

Chosen = Callable[[str], str]


def import_gguf(path: Path, out: Path, **how: Any) -> Path:
    """Import a GGUF LoRA; return the adapter's folder."""
    return import_adapter(path, out, **how).folder


def moved(rows: Tensor, heads: int) -> Tensor:
    """Move the rows of q or k as the converter of Llama does: pairs of one row of each half."""
    half = rows.shape[0] // heads // 2
    order = [h * 2 * half + j * half + i for h in range(heads) for i in range(half) for j in (0, 1)]
    return rows[order]


def converted(model: PreTrainedModel, arch: str) -> dict[str, Tensor]:
    """Return llama.cpp's tensors of a model, in float32."""
    kind = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads}
    heads["k_proj"] = getattr(model.config, "num_key_value_heads", heads["q_proj"])
    found = {}
    for name, parameter in model.named_parameters():
        tensor, stem = parameter.detach().float(), name.rpartition(".")[0]
        leaf = stem.rpartition(".")[2]
        if name.endswith("experts.gate_up_proj"):
            block = f"blk.{name.split('.')[2]}"
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
            continue
        if arch == "llama" and leaf in heads:
            tensor = moved(tensor, heads[leaf])
        if arch == "gpt2" and leaf in ("c_attn", "c_proj", "c_fc") and tensor.ndim == 2:
            tensor = tensor.t()
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        found[theirs if "." in theirs.removeprefix("blk.")[2:] else f"{theirs}.weight"] = tensor
    return found


def write_gguf(
    path: Path, tensors: dict[str, Any], arch: str, kind: Chosen = lambda name: "F32", **keys: int
) -> Path:
    """Write tensors as a base model; a raw one is (bytes per row, type).

    Args:
        kind: The type of a matrix, by its name; vectors are float32.
        keys: More of them, with "." for "__".
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "a", "b"])
    for name, value in keys.items():
        writer.add_uint32(name.replace("__", "."), value)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            data, raw = tensor
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[raw])
            continue
        quant = gguf.GGMLQuantizationType[kind(name) if tensor.ndim > 1 else "F32"]
        data = gguf.quants.quantize(tensor.contiguous().numpy(), quant)
        writer.add_tensor(name, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(path: Path) -> dict[str, Tensor]:
    """Return the values of a file's tensors, as the library reads them."""
    return {
        each.name: torch.from_numpy(gguf.quants.dequantize(each.data, each.tensor_type).copy())
        for each in gguf.GGUFReader(path).tensors
    }


def raw(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return type and bytes of a file's tensors."""
    found = gguf.GGUFReader(path).tensors
    return {each.name: (each.tensor_type.name, each.data.tobytes()) for each in found}
