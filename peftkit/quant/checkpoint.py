"""A packed model's tensors under the names of bitsandbytes' 4-bit checkpoints, and back.

Beside a layer's `weight`, its bits as uint8 (n / 2, 1), that format has `weight.absmax` and
`weight.quant_map`, with nested scales `weight.nested_absmax` and `weight.nested_quant_map`, and in
`weight.quant_state.bitsandbytes__nf4` the rest as the bytes of a JSON object (QuantState.as_dict of
bitsandbytes). It has no stacked experts, no layers but nn.Linear and Conv1D, and its 8 bits are
other ones: these, and weights that do not fill their last block of 64, keep the names they have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.kernels.packed import BLOCK, NESTED_BLOCK
from peftkit.kernels.packing import Packing, packed_tensors
from peftkit.model.places import is_conv1d
from peftkit.quant.layers import QuantizedEmbedding, QuantizedLinear, code_of

STATE = "weight.quant_state.bitsandbytes__"


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer of a model by its name, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def to_checkpoint(model: nn.Module, bare: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of a packed model under the name that it has in a checkpoint.

    Args:
        bare: The same model before it was packed, without data.
    """
    found = dict(tensors_of(model))
    for path, layer in _sayable(model, bare):
        names = _names(path, layer.packing)
        packed, absmax, *nested = (found.pop(own) for own in names)
        state: dict[str, Any] = {
            "quant_type": layer.kind,
            "blocksize": BLOCK,
            "dtype": str(layer.packing.dtype).removeprefix("torch."),
            "shape": list(layer.packing.form.shape),
        }
        found[f"{path}.weight"] = packed
        found[f"{path}.weight.absmax"] = absmax
        found[f"{path}.weight.quant_map"] = code_of(layer.kind)
        if nested:
            scales, code, offset = nested
            found[f"{path}.weight.nested_absmax"] = scales
            found[f"{path}.weight.nested_quant_map"] = code
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
            state["nested_offset"] = offset.item()
        data = bytearray(json.dumps(state).encode())
        found[f"{path}.{STATE}{layer.kind}"] = torch.frombuffer(data, dtype=torch.uint8)
    return found


def from_checkpoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors under the names that a packed model has them by."""
    found = dict(tensors)
    for name in tensors:
        path, sign, kind = name.partition(f".{STATE}")
        if not sign:
            continue
        state = json.loads(bytes(found.pop(name).tolist()))
        del found[f"{path}.weight.quant_map"]
        found[f"{path}.packed"] = found.pop(f"{path}.weight")
        found[f"{path}.packing.absmax_{kind}"] = found.pop(f"{path}.weight.absmax")
        if "nested_offset" in state:
            found[f"{path}.packing.nested_absmax"] = found.pop(f"{path}.weight.nested_absmax")
            found[f"{path}.packing.nested_code"] = found.pop(f"{path}.weight.nested_quant_map")
            found[f"{path}.packing.nested_offset"] = torch.tensor(state["nested_offset"])
    return found


def quantization_config(model: nn.Module, bare: nn.Module) -> dict[str, Any] | None:
    """Return what transformers is to know of a packed model's checkpoint; None: it cannot read it.

    Args:
        bare: The same model before it was packed, without data.
    """
    layers = dict(_sayable(model, bare))
    packed = {id(tensor) for _, tensor, _ in packed_tensors(model)}
    if not layers or packed != {id(layer.packed) for layer in layers.values()}:
        return None
    dense = [n for n, m in bare.named_modules() if _is_replaced(m) and n not in layers]
    any_layer = next(iter(layers.values()))
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": any_layer.kind,
        "bnb_4bit_use_double_quant": len(any_layer.packing.scales) > 1,
        "bnb_4bit_compute_dtype": str(any_layer.packing.dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": dense,
    }


def _sayable(model: nn.Module, bare: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield (path, layer) of the packed layers that the format can say."""
    in_float32 = set(getattr(bare, "_keep_in_fp32_modules", None) or ())
    tables = {id(m.packed) for m in model.modules() if isinstance(m, QuantizedEmbedding)}
    for path, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear) or layer.kind not in ("nf4", "fp4"):
            continue
        if id(layer.packed) in tables:
            continue
        form = layer.packing.form
        whole = form.block == BLOCK and form.shape.numel() % BLOCK == 0
        if whole and _is_replaced(bare.get_submodule(path)) and not in_float32 & {*path.split(".")}:
            yield path, layer


def _is_replaced(module: nn.Module) -> bool:
    """Tell whether transformers puts a layer of bitsandbytes in this one's place."""
    return type(module) is nn.Linear or is_conv1d(module)


def _names(path: str, packing: Packing) -> list[str]:
    scales = [name for name, scale in packing._parameters.items() if scale is not None]
    return [f"{path}.packed", *(f"{path}.packing.{name}" for name in scales)]
