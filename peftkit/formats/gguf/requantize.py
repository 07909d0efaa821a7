"""Quantise the matrices of a GGUF file in 16 or 32 bits, as llama-quantize does without imatrix.

The types are Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1; K and IQ types need llama-quantize. In 4
and 5 bits the embedding and the head are stored in Q8_0 (llama-quantize takes Q6_K).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftkit.errors import AdapterError
from peftkit.events import Listener, Progress, ignore
from peftkit.files import disk
from peftkit.kernels.fake_quantize import gguf_rows

KINDS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
CHUNK = 1 << 22
"""Values read at a time."""
_SENSITIVE = re.compile(r"(token_embd|output|per_layer_token_embd)\.weight")
_KEPT = re.compile(
    r".*(_norm\.weight|ffn_gate_inp|position_embd|token_types|ssm_conv1d|shortconv\.conv|"
    r"altup|laurel|per_layer_model_proj|attn_rel_b|time_mix).*"
)
"""Tensors that llama-quantize leaves in their type (src/llama-quant.cpp): routers, convolutions."""


def requantize(
    source: Path,
    out: Path,
    kind: str,
    *,
    codes: Mapping[str, Tensor] | None = None,
    on_event: Listener = ignore,
) -> None:
    """Write a copy of a GGUF file with its matrices in another type; memory for one chunk.

    Args:
        source: A file in F32, F16 or BF16.
        kind: One of `KINDS`.
        codes: Packed rows (out, bytes of a row) of some tensors, by the file's names.

    Raises:
        AdapterError: The file has quantised matrices.
        OutputError, RunError: The file cannot be written.
    """
    import gguf

    reader: Any = gguf.GGUFReader(source)
    target = gguf.GGMLQuantizationType[kind.upper()]
    kinds = {tensor.name: _kind_of(tensor, target, gguf) for tensor in reader.tensors}
    floats: Any = torch.empty(0).numpy().dtype  # shapes are in values, not in bytes
    doing = f"Quantising to {kind.upper()}"
    with (
        disk.replacing(out, source.stat().st_size) as file,
        contextlib.closing(gguf.GGUFWriter(Path(file.name), _value(reader, _ARCH))) as writer,
    ):
        _copy_keys(reader, writer, gguf, kind)
        for tensor in reader.tensors:
            shape = tuple(int(number) for number in reversed(tensor.shape))
            per_block, num_bytes = gguf.GGML_QUANT_SIZES[kinds[tensor.name]]
            size = int(tensor.n_elements) // per_block * num_bytes
            writer.add_tensor_info(tensor.name, shape, floats, size, kinds[tensor.name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, tensor in enumerate(reader.tensors, 1):
            packed = (codes or {}).get(tensor.name)
            writer.write_tensor_data(
                _quantized(tensor, kinds[tensor.name], gguf) if packed is None else packed.numpy()
            )
            on_event(Progress(doing, number, len(reader.tensors)))


_ARCH = "general.architecture"
_REPLACED = (_ARCH, "general.file_type", "general.alignment")


def _value(reader: Any, name: str) -> str:
    return str(reader.get_field(name).contents())


def _kind_of(tensor: Any, target: Any, gguf: Any) -> Any:
    """Return the type of a tensor in the new file.

    Raises:
        AdapterError: It is quantised already.
    """
    kinds = gguf.GGMLQuantizationType
    if tensor.tensor_type not in (kinds.F32, kinds.F16, kinds.BF16):
        raise AdapterError(
            f"cannot quantise {tensor.name} again",
            found=f"It is in {tensor.tensor_type.name}.",
            fix="Convert the original weights in 16 bits.",
        )
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
    if not is_matrix or _KEPT.fullmatch(tensor.name):
        return tensor.tensor_type
    if int(tensor.shape[0]) % 32:
        return kinds.F16  # llama-quantize does the same: blocks have 32 values
    return kinds.Q8_0 if _SENSITIVE.fullmatch(tensor.name) else target


def _copy_keys(reader: Any, writer: Any, gguf: Any, kind: str) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _REPLACED:
            continue
        element = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    if "general.quantization_version" not in reader.fields:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _quantized(tensor: Any, kind: Any, gguf: Any) -> Any:
    """Return a tensor's data in another type: its rows of bytes."""
    if tensor.tensor_type == kind:
        return tensor.data
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(CHUNK // int(tensor.shape[0]), 1)
    parts = []
    for start in range(0, len(rows), step):
        values = gguf.quants.dequantize(rows[start : start + step].copy(), tensor.tensor_type)
        if kind == gguf.GGMLQuantizationType.F16:
            parts.append(torch.from_numpy(values).half())
        else:
            parts.append(gguf_rows(torch.from_numpy(values), kind.name.lower()))
    return torch.cat(parts).numpy()


def stored_dtype(path: Path) -> str:
    """Return the type of most values of a GGUF file, such as "Q4_1"."""
    import gguf

    sizes: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        kind = tensor.tensor_type.name
        sizes[kind] = sizes.get(kind, 0) + int(tensor.n_elements)
    return max(sizes, key=lambda kind: sizes[kind])
