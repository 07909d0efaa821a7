"""PEFT's LoRAs of stacked experts, written as an adapter folder of this package."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from peftkit.adapter import attach
from peftkit.errors import AdapterError, first_few
from peftkit.files.disk import write_json, write_tensors
from peftkit.formats.guard import read_json, read_tensors
from peftkit.formats.peft.config_fields import written_fields
from peftkit.formats.peft.folder import (
    CONFIG,
    TENSORS,
    Provenance,
    load_adapter,
    named_tensors,
    where_fields,
    write_folder,
)


def save_stacked(
    source: Path, folder: Path, model: nn.Module, origin: Provenance, scratch: Path
) -> None:
    """Write a PEFT adapter with stacked experts as an adapter folder.

    Args:
        model: The base's skeleton; the adapter is attached to it temporarily.
        scratch: A temporary folder.

    Raises:
        AdapterError: It does not fit the model.
    """
    fields = read_json(source / CONFIG)
    bare = scratch / "bare"  # without our notes: what they say of roles needs no values
    bare.mkdir()
    write_tensors(read_tensors(source / TENSORS), bare / TENSORS, {"format": "pt"})
    write_json(fields, bare / CONFIG)
    adapter = load_adapter(model, bare)
    targets = [
        f"{path}.{name}" if name else path
        for path, module in adapter.own.items()
        for name in module.stacked or ("",)
    ]
    method = adapter.method.model_copy(update={"targets": tuple(targets)})
    adapter.method = method
    written = written_fields(adapter)
    where = where_fields(method, origin, written["target_modules"])
    if "fan_in_fan_out" in where:
        where["fan_in_fan_out"] = bool(fields.get("fan_in_fan_out"))
    state = {name: tensor.float() for name, tensor in named_tensors(bare).items()}
    adapter.detach()
    adapter = attach(model, method)  # as it will be loaded: the targets mean the same places
    shapes = {
        f"{path}.{name}": shape
        for path, module in adapter.modules.items()
        for name, shape in module.state_shapes().items()
    }
    adapter.detach()
    if shapes != {name: tuple(tensor.shape) for name, tensor in state.items()}:
        raise AdapterError(
            f"{source} has tensors that its config does not describe",
            found=first_few(sorted(state.keys() ^ shapes.keys()), 20) or "of other shapes",
        )
    write_folder(folder, state, where | written, method, origin)
