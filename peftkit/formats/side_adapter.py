"""Reads an adapter that computes beside the one that is trained, over the same base."""

from __future__ import annotations

from pathlib import Path

from peftkit.base.load import Base
from peftkit.errors import AdapterError
from peftkit.files.disk import sha256_of
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.peft.folder import TENSORS, named_tensors
from peftkit.formats.peft.low_rank import A, B, layers_of, read_low_rank
from peftkit.model.side_adapter import SideAdapter


def read_side_adapter(path: str | Path, base: Base) -> SideAdapter:
    """Read a LoRA of the same base, with the head of values that it may have.

    Args:
        base: The base that a run has loaded, with its own adapter on it.

    Raises:
        AdapterError: It is another kind of adapter, or of another base.
    """
    file, found = read_low_rank(adapter_folder(path), with_head=True)
    origin = file.provenance
    if origin.fingerprint != base.fingerprint and origin.base != base.name:
        raise AdapterError(
            f"the adapter in {file.folder} was trained on another base",
            found=f"trained on {origin.base}; this run's base is {base.name}",
            fix="Train it on this base.",
        )
    tensors = named_tensors(file.folder)
    head = {name: t for name, t in tensors.items() if not name.endswith((A, B))}
    if len({name.rpartition(".")[0] for name in head}) > 1:
        raise AdapterError(
            f"{file.folder} cannot be used beside the adapter that is trained",
            found=f"it has more than a plain LoRA and a head: {', '.join(sorted(head)[:3])}",
            fix="Use a plain LoRA.",
        )
    layers_of(file, found, base.model)
    return SideAdapter(
        {path: (one.a, one.scaling * one.b.float()) for path, one in found.items()},
        {name.rpartition(".")[2]: tensor for name, tensor in head.items()},
        origin.task or {},
        origin.prompt_style,
        sha256_of(file.folder / TENSORS)[:16],
    )
