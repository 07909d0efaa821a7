"""A base model and a full fine-tune of it, read side by side from their files, tensor by tensor.

Neither is built. Names are those of the model's own state: a folder saved without its head lacks
the first part of each name ("transformer."), and one of two tied weights may not be in the file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.errors import BaseError, first_few
from peftkit.files import disk
from peftkit.files.safetensors_header import DTYPES, Entry
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


class Pair:
    """Both models' files, open."""

    def __init__(self, base: ModelFiles, tuned: ModelFiles, stack: contextlib.ExitStack) -> None:
        self._sides = (base, tuned)
        self._open: dict[Path, disk.TensorFile] = {}
        for side in self._sides:
            for file in side.shards.headers:
                path = side.shards.folder / file
                opened = stack.enter_context(disk.open_tensors(path, error=BaseError))
                self._open[path] = opened

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the base's files; tied ones once."""
        base, tuned = self._sides
        first: dict[object, str] = {}
        for name in base.where:
            first.setdefault((base.where[name], tuned.where[name]), name)
        return list(first.values())

    def difference(self, name: str) -> Tensor | None:
        """Return tuned - base in float32, or None where nothing differs.

        Raises:
            BaseError: They differ and are not floats, or not finite.
        """
        entries = [side.entry(name) for side in self._sides]
        if entries[0].dtype == entries[1].dtype:
            one, other = (self._file(side, name).raw(side.where[name][1]) for side in self._sides)
            if torch.equal(one, other):
                return None
            dtype = DTYPES[entries[0].dtype][1]
            values = [] if dtype is None else [one.view(dtype), other.view(dtype)]
        else:
            values = [self._file(side, name).tensor(side.where[name][1]) for side in self._sides]
        strange = sorted({entry.dtype for entry in entries} - {*FLOATS})
        if strange:
            raise BaseError(
                f"cannot subtract {name} of one model from the other's",
                found=f"It is stored in {', '.join(strange)}.",
                fix="Give both models in bf16, fp16 or fp32; dequantise a quantised one first.",
            )
        for value, side in zip(values, self._sides, strict=True):
            if not disk.is_finite(value):
                raise BaseError(
                    f"cannot use {name} of {side.shards.folder}",
                    found="It holds NaN or Infinity.",
                    fix="The model is damaged, or its training diverged.",
                )
        # subtracted in float32: bf16 minus bf16 is exact there, wherever the two are near
        delta = values[1].float().sub_(values[0].float()).view(entries[0].shape)
        return delta if delta.any() else None

    def _file(self, side: ModelFiles, name: str) -> disk.TensorFile:
        return self._open[side.shards.folder / side.where[name][0]]


@contextlib.contextmanager
def open_pair(base: ModelFiles, tuned: ModelFiles) -> Iterator[Pair]:
    """Open the files of both models."""
    with contextlib.ExitStack() as stack:
        yield Pair(base, tuned, stack)


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
    views = {name: _mapped(source, name) for name in skeleton.state_dict()}
    skeleton.load_state_dict(views, assign=True)
    return True


def _mapped(source: ModelFiles, name: str) -> Tensor:
    file, own = source.where[name]
    header, path = source.shards.headers[file], source.shards.folder / file
    entry = header.tensors[own]
    dtype = DTYPES[entry.dtype][1]
    assert dtype is not None
    size = header.payload + entry.end
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    data = data[header.payload + entry.start :]
    if data.storage_offset() % dtype.itemsize:  # of a file that some other program wrote
        data = data.clone()
    return data.view(dtype).view(entry.shape)
