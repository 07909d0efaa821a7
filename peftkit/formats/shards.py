"""A model folder's safetensors files, read and rewritten one tensor at a time.

The folder is as transformers saves it: model.safetensors, or model-0000x-of-0000y.safetensors with
an index that says which tensor is where. Memory use is that of a tensor or two.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftkit.errors import BaseError, RunError
from peftkit.files import disk
from peftkit.files.safetensors_header import DTYPE_NAMES, DTYPES, Entry, Header, TensorSpec
from peftkit.files.strict_json import shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
CONFIG = "config.json"

# What holds weights, or speaks of this very repository: everything else is copied as it is.
_NOT_COPIED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"),
    *(".safetensors.index.json", ".bin.index.json", ".md", ".lock"),
)
# Where a config says one, in the parts of a composed model too; not parsed, because real configs
# hold what JSON does not (Infinity) and all the rest is to stay as it is.
_DTYPE = re.compile(rb'("(?:torch_)?dtype"\s*:\s*")\w+(")')


@dataclass(frozen=True, slots=True)
class Shards:
    """The weight files of a model folder, their headers checked."""

    folder: Path
    headers: Mapping[str, Header]
    """File name to header."""
    index_metadata: Mapping[str, Any] | None
    """The metadata of the index; None where there is none."""

    @property
    def entries(self) -> dict[str, Entry]:
        """Header entries by tensor name."""
        return {name: e for header in self.headers.values() for name, e in header.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Size of all weights."""
        return sum(entry.end - entry.start for entry in self.entries.values())


def find_shards(folder: Path) -> Shards | None:
    """Return a model folder's weight files, or None where it has no safetensors.

    Raises:
        BaseError: A file is missing, damaged, or not as the index says.
    """
    if (folder / SINGLE).exists():  # transformers prefers it to an index, too
        return Shards(folder, {SINGLE: _header(folder / SINGLE)}, None)
    if not (folder / INDEX).exists():
        return None
    index = disk.read_json(folder / INDEX, max_bytes=MAX_INDEX_BYTES, error=BaseError)
    where, metadata = index.get("weight_map"), index.get("metadata", {})
    asked = f"cannot read the weights of {folder}"
    if not isinstance(where, dict) or not isinstance(metadata, dict) or not where:
        raise BaseError(asked, found=f"{INDEX} has no weight_map")
    strange = [f for f in where.values() if not isinstance(f, str) or Path(f).name != f]
    if strange:
        raise BaseError(asked, found=f"{INDEX} names the file {shown(strange[0])}")
    headers = {name: _header(folder / name) for name in sorted(set(where.values()))}
    shards = Shards(folder, headers, metadata)
    actual = {tensor: name for name, header in headers.items() for tensor in header.tensors}
    if actual != where:
        differing = sorted(
            name for name in actual.keys() | where.keys() if actual.get(name) != where.get(name)
        )
        raise BaseError(
            asked,
            found=f"{len(differing)} tensors are not where {INDEX} says, as {shown(differing[0])}",
            fix="Download the model again.",
        )
    return shards


def _header(path: Path) -> Header:
    with disk.open_tensors(path, error=BaseError) as file:
        return file.header


def rewrite_shards(
    shards: Shards,
    out: Path,
    changes: Mapping[str, Callable[[Tensor], Tensor]],
    *,
    dtype: torch.dtype | None = None,
    on_shard: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> None:
    """Write the weights again into another folder, some of them changed.

    Args:
        shards: What to write.
        out: An existing folder.
        changes: Functions of tensors to change, by name; all others are copied bit for bit.
        dtype: Convert every float tensor to this; None keeps each tensor's own.
        on_shard: Called before each file with its name, its number from 0, and how many there are.

    Raises:
        RunError: A changed tensor is not finite in its dtype; or the disk is full.
        BaseError: A tensor to be changed is not a float tensor.
    """
    specs = {
        name: [
            TensorSpec(n, _new_dtype(e.dtype, dtype), e.shape) for n, e in header.tensors.items()
        ]
        for name, header in shards.headers.items()
    }
    total_bytes = sum(spec.num_bytes for some in specs.values() for spec in some)
    disk.check_space(out, total_bytes)
    for number, (name, header) in enumerate(shards.headers.items()):
        on_shard(name, number, len(shards.headers))
        source = _rewritten(shards.folder / name, specs[name], changes)
        disk.write_tensor_stream(out / name, specs[name], source, header.metadata or None)
    if shards.index_metadata is not None:
        metadata = {**shards.index_metadata, "total_size": total_bytes}
        where = {tensor: name for name, h in shards.headers.items() for tensor in h.tensors}
        disk.write_json({"metadata": metadata, "weight_map": where}, out / INDEX)


def _new_dtype(name: str, dtype: torch.dtype | None) -> str:
    return DTYPE_NAMES[dtype] if dtype and name in ("F64", "F32", "F16", "BF16") else name


def _rewritten(
    path: Path, specs: list[TensorSpec], changes: Mapping[str, Callable[[Tensor], Tensor]]
) -> Iterator[Tensor]:
    with disk.open_tensors(path, error=BaseError) as file:
        for spec in specs:
            entry = file.header.tensors[spec.name]
            change = changes.get(spec.name)
            if change is None and spec.dtype == entry.dtype:
                yield file.raw(spec.name)
                continue
            tensor = file.tensor(spec.name)
            if not tensor.is_floating_point():
                raise BaseError(
                    f"cannot change {spec.name} of {path}", found=f"its dtype is {entry.dtype}"
                )
            if change is not None:
                tensor = change(tensor)
            new_dtype = DTYPES[spec.dtype][1]
            assert new_dtype is not None
            tensor = tensor.to(new_dtype)
            if not disk.is_finite(tensor):
                raise RunError(
                    f"cannot write {spec.name} in {spec.dtype}",
                    found="it holds NaN, Infinity, or numbers too large for that dtype",
                    fix="Write bf16 or fp32; if it is the base's own, the base is damaged.",
                )
            yield tensor


def copy_companions(folder: Path, out: Path, *, dtype: torch.dtype | None = None) -> list[Path]:
    """Copy all that is no weight: tokenizer, generation config, and config.json with its new dtype.

    config.json comes last: a folder without it is loaded by nothing.
    """
    written = []
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name == CONFIG:
            continue
        if path.name.lower().endswith(_NOT_COPIED):
            continue
        with (
            open(path, "rb") as source,
            disk.replacing(out / path.name, path.stat().st_size) as f,
        ):
            shutil.copyfileobj(source, f, 1 << 20)
        written.append(out / path.name)
    config = (folder / CONFIG).read_bytes()
    if dtype is not None:
        config = _DTYPE.sub(rb"\1%s\2" % str(dtype).removeprefix("torch.").encode(), config)
    disk.write_bytes_atomic(config, out / CONFIG)
    return [*written, out / CONFIG]
