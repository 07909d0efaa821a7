"""Merging over a base's safetensors files, one tensor at a time, without building the model.

The folder has transformers' layout: model.safetensors, or model-0000x-of-0000y.safetensors with an
index from tensors to files. Memory holds a tensor or two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from peftkit.base.load import local_folder
from peftkit.base.skeleton import hollow
from peftkit.errors import BaseError, RunError
from peftkit.events import Listener, Progress, ignore
from peftkit.figures import dtype_name
from peftkit.files import disk
from peftkit.files.strict_json import JsonMap, shown
from peftkit.files.tensors import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    Header,
    TensorSpec,
    is_finite,
    open_tensors,
    write_tensor_stream,
)
from peftkit.formats.peft.load import AdapterFile, load_adapter
from peftkit.kernels.device import keep_freed_memory
from peftkit.merging.fold import Tally, check_all, merged_tensor, untie
from peftkit.methods.table import method_from_peft

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
CONFIG = "config.json"
FLOATS = {
    DTYPE_NAMES[dtype]: dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}

Changes = Mapping[str, Callable[[Tensor], Tensor]]
"""Name of a tensor in the files -> function that merges it."""

# Weights, and files that describe the source repository; all others are copied unchanged.
_NOT_COPIED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"),
    *(".safetensors.index.json", ".bin.index.json", ".md", ".lock"),
)
# The dtype in a config, also of sub-models. The config is not parsed: real configs hold values that
# JSON does not allow (Infinity), and all other bytes stay unchanged.
_DTYPE = re.compile(rb'("(?:torch_)?dtype"\s*:\s*")\w+(")')


@dataclass(frozen=True, slots=True)
class Shards:
    """The weight files of a model folder, their headers checked."""

    folder: Path
    headers: Mapping[str, Header]
    """File name to header."""
    index_metadata: JsonMap | None
    """The metadata of the index; None without an index."""

    @property
    def entries(self) -> dict[str, Entry]:
        """Header entries by tensor name."""
        return {name: e for header in self.headers.values() for name, e in header.tensors.items()}


def files_of(base: str, revision: str | None) -> Shards | None:
    """Return the base's weight files if all of them are on this machine.

    Raises:
        BaseError: The base does not exist, or its files are damaged.
    """
    folder = local_folder(base, revision)
    if folder is None:
        return None
    try:
        return find_shards(folder)
    except BaseError:
        if Path(base).expanduser().exists():
            raise
        return None  # an unfinished download, which loading continues


def find_shards(folder: Path) -> Shards | None:
    """Return a model folder's weight files, or None if it has no safetensors.

    Raises:
        BaseError: A file is missing or damaged.
    """
    if (folder / SINGLE).exists():  # transformers prefers it to an index, too
        return Shards(folder, {SINGLE: _header(folder / SINGLE)}, None)
    if not (folder / INDEX).exists():
        return None
    index = disk.read_json(folder / INDEX, max_bytes=MAX_INDEX_BYTES, error=BaseError)
    file_of, metadata = index.get("weight_map"), index.get("metadata", {})
    message = f"cannot read the weights of {folder}"
    if not isinstance(file_of, dict) or not isinstance(metadata, dict) or not file_of:
        raise BaseError(message, found=f"{INDEX} has no weight_map")
    invalid = [f for f in file_of.values() if not isinstance(f, str) or Path(f).name != f]
    if invalid:
        raise BaseError(message, found=f"{INDEX} names the file {shown(invalid[0])}")
    headers = {name: _header(folder / name) for name in sorted(set(file_of.values()))}
    return Shards(folder, headers, metadata)


def _header(path: Path) -> Header:
    with open_tensors(path, error=BaseError) as file:
        return file.header


def changes_of(
    file: AdapterFile,
    shards: Shards,
    model: nn.Module,
    dtype: torch.dtype | None,
    tally: Tally,
    trained_over: torch.dtype | None = None,
) -> Changes | None:
    """Return the merge function of each changed tensor; None if merging needs the model in memory.

    Args:
        model: The base without weights; it is filled with zeros.
        dtype: Dtype of the stored weights; None keeps each weight's dtype.
        tally: Updated while the tensors are merged.
        trained_over: Dtype to which changed weights are rounded before the merge.

    Raises:
        AdapterError: The adapter does not fit the base.
        MergeError: A weight cannot be merged.
    """
    method = method_from_peft(file.fields)
    if method.train_fully or method.token_rows:
        return None
    if getattr(method, "init", "") in ("pissa", "olora"):
        return None  # its initial value is computed from the base
    adapter = load_adapter(hollow(model), file.folder)
    if adapter.tables or untie(adapter):
        return None  # the config or the vocabulary changes too
    check_all(adapter)
    entries, prefix, changes = shards.entries, getattr(model, "base_model_prefix", ""), {}
    for path, module in adapter.modules.items():
        for name in module.changed:
            full = f"{path}.{name}"
            # a folder saved without its head lacks the first part of each name ("transformer.")
            stored_name = full if full in entries else full.removeprefix(f"{prefix}.")
            entry = entries.get(stored_name)
            if entry is None or entry.dtype not in FLOATS:
                return None
            if entry.shape != tuple(module.base.get_parameter(name).shape):
                return None
            stored = dtype or FLOATS[entry.dtype]
            changes[stored_name] = partial(
                merged_tensor, module, name, dtype=stored, tally=tally, trained_over=trained_over
            )
    return changes


def write_over_files(
    shards: Shards,
    out: Path,
    changes: Changes,
    *,
    dtype: torch.dtype | None = None,
    on_event: Listener = ignore,
) -> None:
    """Write a copy of a model folder with some weights changed and all others bit for bit.

    Args:
        shards: The source files.
        out: An existing folder.
        dtype: Convert every float tensor to this dtype; None keeps each tensor's dtype.

    Raises:
        RunError: A changed tensor is not finite in its dtype, or the disk is full.
        BaseError: A tensor to be changed is not a float tensor.
    """
    keep_freed_memory()
    specs = {
        name: [
            TensorSpec(n, DTYPE_NAMES[dtype] if dtype and e.dtype in FLOATS else e.dtype, e.shape)
            for n, e in header.tensors.items()
        ]
        for name, header in shards.headers.items()
    }
    total_bytes = sum(spec.num_bytes for some in specs.values() for spec in some)
    disk.check_space(out, total_bytes)
    for number, (name, header) in enumerate(shards.headers.items()):
        on_event(Progress(f"Writing {name}", number, len(shards.headers)))
        source = _rewritten(shards.folder / name, specs[name], changes)
        write_tensor_stream(out / name, specs[name], source, header.metadata or None)
    if shards.index_metadata is not None:
        metadata = {**shards.index_metadata, "total_size": total_bytes}
        where = {tensor: name for name, h in shards.headers.items() for tensor in h.tensors}
        disk.write_json({"metadata": metadata, "weight_map": where}, out / INDEX)
    _copy_companions(shards.folder, out, dtype)


def _rewritten(path: Path, specs: list[TensorSpec], changes: Changes) -> Iterator[Tensor]:
    with open_tensors(path, error=BaseError) as file:
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
            if not is_finite(tensor):
                raise RunError(
                    f"cannot write {spec.name} in {spec.dtype}",
                    found="It holds NaN, Infinity, or numbers too large for this dtype.",
                    fix="Write bf16 or fp32; if the base's dtype is the same, the base is damaged.",
                )
            yield tensor


def _copy_companions(folder: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Copy all other files: tokenizer, generation config, and config.json with its new dtype.

    config.json is written last, since no library loads a folder without it.
    """
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name == CONFIG:
            continue
        if not path.name.lower().endswith(_NOT_COPIED):
            disk.write_bytes_atomic(path.read_bytes(), out / path.name)
    config = (folder / CONFIG).read_bytes()
    if dtype is not None:
        config = _DTYPE.sub(rb"\1%s\2" % dtype_name(dtype).encode(), config)
    disk.write_bytes_atomic(config, out / CONFIG)
