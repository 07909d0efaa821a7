"""A packed model over the pages of a safetensors file: built without data, then filled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.base.class_head import head_of_classes
from peftkit.base.codes import empty_codes
from peftkit.base.published import has_codes, scheme_of
from peftkit.base.purpose import Purpose
from peftkit.base.quantized import published
from peftkit.base.shapes import on_meta
from peftkit.base.storage_format import StorageFormat
from peftkit.errors import BaseError
from peftkit.files import disk
from peftkit.files.safetensors_header import DTYPES
from peftkit.kernels.packing import Packing
from peftkit.model.places import is_conv1d
from peftkit.quant.checkpoint import from_checkpoint, tensors_of
from peftkit.quant.layers import empty_packed
from peftkit.quant.quantize import has_plain_forward, install_packed, quantizable, tower_paths


def packed_skeleton(
    config: Any, purpose: Purpose, form: StorageFormat, *, counted: bool = False
) -> Any:
    """Build the packed model on the meta device.

    Args:
        counted: Under a mode in which tensors have no data: packed ones are on the CPU, and layers
            that have to be called to know what they compute are packed too.
    """
    model: Any = on_meta(config, purpose, form.dtype)
    model.tie_weights()
    settings = published(config) if form.quantize == "none" else None
    if form.quantize == "none" and settings is None:
        return model
    head = head_of_classes(model) if purpose.head is not None else ()
    packs_towers = form.quantize_towers or settings is not None
    jobs = quantizable(model, keep=head if packs_towers else (*head, *tower_paths(model)))
    device = torch.device("cpu" if counted else "meta")
    made: dict[tuple[int, str], nn.Parameter] = {}
    packings = {}
    for path, module, name in jobs:
        weight = module._parameters[name]
        if settings is not None and not has_codes(settings, weight):
            continue
        if name == "weight" and not counted and not has_plain_forward(module):
            continue
        assert weight is not None
        turned = name == "weight" and is_conv1d(module)
        shape = torch.Size(reversed(weight.shape)) if turned else weight.shape
        if (key := (id(module), name)) not in made:
            with torch.device(device):
                if settings is not None:
                    packed, kept, scales = empty_codes(shape, scheme_of(settings, path))
                    packing = Packing(kept, form.dtype, scales)
                else:
                    packed, packing = empty_packed(
                        shape, form.quantize, form.dtype, double_quant=form.double_quant
                    )
            made[key] = nn.Parameter(packed, requires_grad=False)
            packings[id(made[key])] = packing
    for _, module, name in jobs:
        if (id(module), name) in made:
            module._parameters[name] = made[id(module), name]
    install_packed(model, jobs, packings, device)
    return model


def mapped(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors, whose memory is the file's pages."""
    with disk.open_tensors(path, error=BaseError) as file:
        header = file.header
    storage: Any = torch.UntypedStorage.from_file(
        str(path), shared=False, nbytes=path.stat().st_size
    )
    found = {}
    for name, entry in header.tensors.items():
        dtype = DTYPES[entry.dtype][1]
        assert dtype is not None
        start = (header.payload + entry.start) // dtype.itemsize
        found[name] = torch.empty(0, dtype=dtype)
        stride = torch.empty(entry.shape, device="meta").stride()
        found[name].set_(storage, start, entry.shape, stride)
    return found


def fill(model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> str:
    """Put a checkpoint's tensors in the places of those without data, tied ones in all of theirs.

    Returns:
        What differs between the two, or "".
    """
    tensors = from_checkpoint(tensors)
    expected = dict(tensors_of(model))
    differing = expected.keys() ^ tensors.keys()
    differing |= {n for n in expected.keys() & tensors if expected[n].shape != tensors[n].shape}
    if differing:
        return f"Its tensors are not the model's, as {sorted(differing)[0]}."
    new: dict[int, Tensor] = {}
    for name, old in expected.items():
        moved = tensors[name].to(device)
        is_parameter = isinstance(old, nn.Parameter)
        new[id(old)] = nn.Parameter(moved, requires_grad=False) if is_parameter else moved
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            for name, tensor in places.items():
                if tensor is not None and id(tensor) in new:
                    places[name] = new[id(tensor)]  # type: ignore[assignment]
    left = without_data(model)
    return f"It does not say {left}." if left else ""


def without_data(model: nn.Module) -> str:
    """Return where a tensor has no data: one that is neither a parameter nor a buffer."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.device.type == "meta":
                return f"{path}.{name}"
    return ""
