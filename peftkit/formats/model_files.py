"""A model's weight files under the names of the model's own state; two models side by side.

No model is built. A folder saved without its head lacks the first part of each name
("transformer."), and one of two tied weights may not be in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor, nn

from peftkit.errors import BaseError, first_few
from peftkit.files import disk
from peftkit.files.safetensors_header import Entry
from peftkit.formats.shards import Shards

FLOATS = ("F64", "F32", "F16", "BF16")
NO_WEIGHTS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")
"""Buffers that old versions of transformers saved and new ones compute."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model's weight files, under the names of the model's state.

    Attributes:
        where: Name in the state -> file and name in it; names of no state keep their own.
    """

    shards: Shards
    where: Mapping[str, tuple[str, str]]

    def entry(self, name: str) -> Entry:
        """Return the header's entry of a tensor."""
        file, own = self.where[name]
        return self.shards.headers[file].tensors[own]

    def raw(self, name: str) -> Tensor:
        """Return the bytes of a tensor."""
        file, own = self.where[name]
        with disk.open_tensors(self.shards.folder / file, error=BaseError) as opened:
            return opened.raw(own)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in its own dtype and shape."""
        file, own = self.where[name]
        with disk.open_tensors(self.shards.folder / file, error=BaseError) as opened:
            return opened.tensor(own)


def model_files(shards: Shards, skeleton: nn.Module) -> ModelFiles:
    """Name the tensors of a model's files as its state does.

    Args:
        skeleton: The model without weights; its tied weights are the same parameter.
    """
    state = skeleton.state_dict().keys()
    prefix = getattr(skeleton, "base_model_prefix", "")
    where = {}
    for file, header in shards.headers.items():
        for own in header.tensors:
            longer = f"{prefix}.{own}"
            name = longer if own not in state and longer in state else own
            if name in state or not NO_WEIGHTS.search(own):
                where[name] = (file, own)
    for group in tied(skeleton):
        known = next((name for name in group if name in where), None)
        if known is not None:
            where |= {name: where[known] for name in group if name not in where}
    return ModelFiles(shards, where)


def tied(skeleton: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def check_alike(base: ModelFiles, tuned: ModelFiles) -> None:
    """Refuse two models that do not have the same tensors.

    Raises:
        BaseError: Lists what one of them lacks, and what has another shape.
    """
    problems = [
        f"{name} is not in {other.shards.folder}"
        for one, other in ((base, tuned), (tuned, base))
        for name in one.where
        if name not in other.where
    ]
    problems += [
        f"{name}: {base.entry(name).shape} in the base, {tuned.entry(name).shape} in the other"
        for name in base.where
        if name in tuned.where and base.entry(name).shape != tuned.entry(name).shape
    ]
    if not problems:
        return
    raise BaseError(
        f"{tuned.shards.folder} is not a fine-tune of {base.shards.folder}",
        found=first_few(problems, 8),
        fix="Give the model that it was tuned from. An adapter cannot add words or layers.",
    )


def names_of(base: ModelFiles, tuned: ModelFiles) -> list[str]:
    """Return the names of both models' tensors, in the order of the base; tied ones once."""
    first: dict[object, str] = {}
    for name in base.where:
        first.setdefault((base.where[name], tuned.where[name]), name)
    return list(first.values())


def difference(base: ModelFiles, tuned: ModelFiles, name: str) -> Tensor | None:
    """Return tuned - base in float32, or None where nothing differs.

    Raises:
        BaseError: They differ and are not floats, or not finite.
    """
    entries = [side.entry(name) for side in (base, tuned)]
    if entries[0].dtype == entries[1].dtype and torch.equal(base.raw(name), tuned.raw(name)):
        return None
    strange = sorted({entry.dtype for entry in entries} - {*FLOATS})
    if strange:
        raise BaseError(
            f"cannot subtract {name} of one model from the other's",
            found=f"It is stored in {', '.join(strange)}.",
            fix="Give both models in bf16, fp16 or fp32; dequantise a quantised one first.",
        )
    values = [side.tensor(name) for side in (base, tuned)]
    for value, side in zip(values, (base, tuned), strict=True):
        if not disk.is_finite(value):
            raise BaseError(
                f"cannot use {name} of {side.shards.folder}",
                found="It holds NaN or Infinity.",
                fix="The model is damaged, or its training diverged.",
            )
    # subtracted in float32: bf16 minus bf16 is exact there, wherever the two are near
    delta = values[1].float().sub_(values[0].float()).view(entries[0].shape)
    return delta if delta.any() else None


def filled(skeleton: nn.Module, source: ModelFiles) -> bool:
    """Give a skeleton its weights as views of the files, of which only what is used is read.

    Returns:
        Whether the files have all of them, as floats in the skeleton's shapes; if not, it stays
        empty.
    """
    for name, tensor in skeleton.state_dict().items():
        if name not in source.where:
            return False
        entry = source.entry(name)
        if entry.shape != tuple(tensor.shape) or entry.dtype not in FLOATS:
            return False
    views: dict[str, Tensor] = {}
    for file in source.shards.headers:
        with safe_open(source.shards.folder / file, "pt") as opened:  # pages of the file
            own = {name: at for name, (where, at) in source.where.items() if where == file}
            views |= {n: opened.get_tensor(own[n]) for n in skeleton.state_dict() if n in own}
    skeleton.load_state_dict(views, assign=True)
    return True
