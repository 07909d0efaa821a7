"""Bases that were packed once, kept in the cache and opened again by mapping their file.

A folder for each base and form: `model.safetensors`, under the names of bitsandbytes' checkpoints
where these can say it (quant/checkpoint.py); `buffers.safetensors`, what no checkpoint holds;
`store.json`, what they were made of; and `config.json` where transformers can open the folder by
itself. It is whole or not there. It is of use as long as the base's files are those that it was
made of, and its own are as they were written. Two processes that open it share its pages.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from peftkit.base.locate import Location, cache_folder
from peftkit.base.mapped import fill, mapped, packed_skeleton
from peftkit.base.pretrained import snapshot
from peftkit.base.purpose import Purpose
from peftkit.base.quantized import published, quantized_by
from peftkit.base.shapes import on_meta
from peftkit.base.storage_format import LoadedModel, StorageFormat
from peftkit.errors import BaseError, OutputError, PeftkitError
from peftkit.events import Listener, Notice
from peftkit.files import disk
from peftkit.files.folders import alone, new_folder
from peftkit.files.safetensors_header import DTYPE_NAMES, TensorSpec
from peftkit.quant.checkpoint import quantization_config, tensors_of, to_checkpoint

VERSION = 2
WEIGHTS, BUFFERS = "model.safetensors", "buffers.safetensors"
MANIFEST, FOLDER = "store.json", "packed"
LEFT_FREE = 10_000_000_000
"""Bytes of a disk that no packed base is written into without being asked for."""
WORTH_KEEPING = 500_000_000
"""Bytes of a packed base from which on it is kept without being asked: seconds of packing."""


@dataclass(frozen=True, slots=True)
class StoreKey:
    """A base that the cache may keep packed.

    Attributes:
        name: As it is recorded. source: The folder with its files, or its GGUF file. config: Of
            transformers.
    """

    name: str
    source: Path
    purpose: Purpose
    config: Any
    form: StorageFormat


def storable(
    location: Location,
    revision: str | None,
    purpose: Purpose,
    config: Any,
    form: StorageFormat,
    *,
    shared: bool = False,
) -> Path | None:
    """Return the folder, or the GGUF file, of a base that the cache may keep packed, or None.

    Args:
        shared: By several processes: then also one that is not packed, or has a head of classes.
    """
    if not shared and (form.quantize == "none" or purpose.head is not None):
        return None
    known = published(config)
    if quantized_by(config) and known is None:
        return None
    if known is not None and form.quantize == "none":  # opening its own files is as fast
        return None
    if location.gguf:
        return location.gguf_path
    return Path(location.source) if location.is_local else snapshot(location, revision)


def opened_or_kept(
    wanted: StoreKey, rebuild: Callable[[], LoadedModel], on_event: Listener
) -> LoadedModel:
    """Open a base that is kept packed; else build it, and keep it if it is large."""
    folder = folder_of(wanted.source, wanted.form, wanted.purpose)
    was_kept = (folder / MANIFEST).is_file()
    if was_kept:
        try:
            return open_stored(folder, wanted)
        except BaseError as error:
            on_event(Notice(f"The base is packed again. {error.asked} {error.found}"))
    size = num_bytes(packed_skeleton(wanted.config, wanted.purpose, wanted.form))
    if size < WORTH_KEEPING and not was_kept:
        return rebuild()
    try:
        sizes, is_tight = room_for(size)
    except PeftkitError as error:  # a run goes on without
        on_event(Notice(f"The packed base is not kept. {error.asked} {error.found}"))
        return rebuild()
    if is_tight:
        fix = f"peftkit base pack {wanted.name} asks, and keeps it."
        on_event(Notice(f"The packed base is not kept. {sizes} {fix}"))
        return rebuild()
    with being_packed(folder, on_event) as has_waited:
        if has_waited:
            with contextlib.suppress(BaseError):
                return open_stored(folder, wanted)
        built = rebuild()
        try:
            keep(folder, built, wanted)
            on_event(Notice(f"The packed base is kept in {folder}. {sizes}"))
        except PeftkitError as error:
            on_event(Notice(f"The packed base is not kept. {error.asked} {error.found}"))
    return built


@contextmanager
def being_packed(folder: Path, on_event: Listener) -> Iterator[bool]:
    """Be the only process that packs a base into its folder; say whether another did just before.

    Args:
        folder: In a folder that is there.
    """
    waited = []

    def wait() -> None:
        waited.append(True)
        on_event(Notice("Another process is packing this base; this one waits for it."))

    with alone(folder, wait):
        yield bool(waited) and (folder / MANIFEST).is_file()


def num_bytes(model: nn.Module) -> int:
    """Return the bytes that a packed base takes on the disk."""
    return sum(tensor.nbytes for _, tensor in tensors_of(model))


def room_for(size: int) -> tuple[str, bool]:
    """Return a sentence on what is needed and free, and whether little would be left of it.

    Raises:
        OutputError: The cache cannot be written. RunError: The disk has less.
    """
    folder = disk.writable_folder(store_folder())
    disk.check_space(folder, size)
    free = disk.free_bytes(folder)
    sizes = f"It takes {size / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free in {folder}."
    return sizes, free - size < LEFT_FREE


def store_folder() -> Path:
    """Return where packed bases are kept."""
    return cache_folder() / FOLDER


def folder_of(source: Path, form: StorageFormat, purpose: Purpose) -> Path:
    """Return where a base is kept in this form.

    Args:
        source: The folder with its files, or its GGUF file.
    """
    head = [] if purpose.head is None else [repr(purpose.head)]
    known = json.dumps([str(source.resolve()), purpose.auto_class, _form(form), *head])
    name = re.sub(r"[^\w.-]+", "-", source.name)[:40]
    return store_folder() / f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"


def keep(folder: Path, built: LoadedModel, wanted: StoreKey) -> None:
    """Write a packed base into the cache.

    Raises:
        OutputError, RunError: The cache cannot be written, or the disk is full; nothing is left.
    """
    bare = on_meta(wanted.config, wanted.purpose, wanted.form.dtype)
    files = _files(built.model, bare)
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    disk.writable_folder(folder.parent)
    disk.check_space(folder.parent, size)
    try:
        with new_folder(folder, last=MANIFEST) as made:
            for name, tensors in files.items():
                _write(tensors, made / name)
            if (settings := quantization_config(built.model, bare)) is not None:
                config = copy.deepcopy(built.model.config)
                config.quantization_config = settings
                disk.write_text(config.to_json_string(), made / "config.json")
            manifest = {
                "version": VERSION,
                "model": wanted.name,
                "fingerprint": built.fingerprint,
                "head": list(built.head),
                "form": _form(wanted.form),
                "stamp": _stamp(wanted.source),
                "sha256": {name: disk.sha256_of(made / name) for name in files},
            }
            disk.write_json(manifest, made / MANIFEST)
    except OSError as error:
        raise OutputError(
            f"cannot write {folder}.", found=str(error), fix="Set PEFTKIT_CACHE to another folder."
        ) from error


def open_stored(folder: Path, wanted: StoreKey, *, is_known: bool = False) -> LoadedModel:
    """Open a packed base by mapping its file; on a GPU its tensors are copied there.

    Args:
        is_known: It was written, or opened, right before: its file is not read for its hash.

    Raises:
        BaseError: It is damaged, of another version, or the base's files have changed since.
    """
    manifest, form = manifest_of(folder), wanted.form
    if manifest["stamp"] != _stamp(wanted.source):
        raise _useless(folder, f"The files of {wanted.source} have changed since it was made.")
    tensors: dict[str, Tensor] = {}
    for name, expected in manifest["sha256"].items():
        path = folder / name
        if not path.is_file() or not (is_known or disk.sha256_of(path) == expected):
            raise _useless(folder, f"{name} is not as it was written.")
        tensors |= mapped(path)
    model = packed_skeleton(wanted.config, wanted.purpose, form)
    if problem := fill(model, tensors, form.device):
        raise _useless(folder, problem)
    model.config.dtype = form.dtype
    model.is_quantized = False
    return LoadedModel(
        model.requires_grad_(False).eval(), manifest["fingerprint"], tuple(manifest.get("head", ()))
    )


def _files(model: nn.Module, bare: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file; those that no checkpoint of the model would hold apart."""
    tensors = to_checkpoint(model, bare)
    apart = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    buffers = {name: tensors.pop(name) for name in apart}
    return {WEIGHTS: tensors} | ({BUFFERS: buffers} if buffers else {})


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    specs = [TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    specs.sort(key=lambda spec: spec.order)
    values = (tensors[spec.name] for spec in specs)
    disk.write_tensor_stream(path, specs, values, {"format": "pt"})


def _form(form: StorageFormat) -> dict[str, Any]:
    return {
        "quantize": form.quantize,
        "double_quant": form.double_quant,
        "quantize_towers": form.quantize_towers,
        "dtype": str(form.dtype).removeprefix("torch."),
    }


def _stamp(source: Path) -> dict[str, list[int]]:
    """Return the size and the time of every file that a base is read from."""
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    if source.is_file():
        files = [source]
    return {p.name: [(s := os.stat(p)).st_size, s.st_mtime_ns] for p in files if p.is_file()}


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return what a packed base says of itself.

    Raises:
        BaseError: It is not whole, or of another version.
    """
    manifest = disk.read_json(folder / MANIFEST, error=BaseError)
    if manifest.get("version") != VERSION:
        found = f"It is of version {manifest.get('version')} of this format, not {VERSION}."
        raise _useless(folder, found)
    if {"model", "fingerprint", "form", "stamp", "sha256"} - manifest.keys():
        raise _useless(folder, f"{MANIFEST} is not whole.")
    return manifest


def _useless(folder: Path, found: str) -> BaseError:
    fix = f"Remove it: peftkit base rm {folder.name}"
    return BaseError(f"cannot use the packed base {folder.name}.", found=found, fix=fix)
