"""Packed bases in the cache, opened again by mapping their files.

Each base and form has a folder: `model.safetensors` with every parameter and buffer of the packed
model, and `store.json`, which identifies the base's files. A folder is complete or absent. It is
valid as long as neither its own files nor the base's have changed. Processes that open the same one
share its pages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from peftkit.base.build import LoadedModel, build
from peftkit.base.locate import cache_folder
from peftkit.base.pretrained import files_of, published
from peftkit.base.request import BaseRequest
from peftkit.base.skeleton import packed_skeleton, weight_bytes
from peftkit.errors import BaseError, OutputError, PeftkitError
from peftkit.events import Listener, Notice
from peftkit.figures import size
from peftkit.files import disk
from peftkit.files.disk import new_folder
from peftkit.files.tensors import specs_of, write_tensor_stream

VERSION = 3
WEIGHTS, MANIFEST, FOLDER = "model.safetensors", "store.json", "packed"
LEFT_FREE = 10_000_000_000
"""Bytes of a disk that only `peftkit base pack` fills."""
WORTH_KEEPING = 500_000_000
"""Bytes of a packed base from which on the cache keeps it: seconds of packing."""


def open_or_build(request: BaseRequest, on_event: Listener) -> LoadedModel:
    """Open the packed base that the cache keeps, or build it out of its files.

    Raises:
        BaseError: As `build`.
    """
    folder = folder_of(request) if request.settings.store == "auto" else None
    if folder is None:
        return build(request, on_event=on_event)
    was_kept = (folder / MANIFEST).is_file()
    if was_kept:
        try:
            return open_stored(folder, request)
        except BaseError as error:
            on_event(Notice(f"The base is packed again. {error.asked} {error.found}"))
    num_bytes = packed_size(request)
    if num_bytes < WORTH_KEEPING and not was_kept:
        return build(request, on_event=on_event)
    return _build_and_keep(folder, num_bytes, request, on_event)


def _build_and_keep(
    folder: Path, num_bytes: int, request: BaseRequest, on_event: Listener
) -> LoadedModel:
    """Build a base, and keep it in the cache if the disk has room for it."""
    try:
        sizes, is_tight = room_for(num_bytes)
        pack = f"peftkit base pack {request.location.name} keeps it all the same."
        problem = f"{sizes} {pack}" if is_tight else ""
    except PeftkitError as error:  # a run goes on without
        problem = f"{error.asked} {error.found}"
    if problem:
        on_event(Notice(f"The packed base is not kept. {problem}"))
        return build(request, on_event=on_event)
    with packing_alone(folder, on_event) as is_there:
        if is_there:
            with suppress(BaseError):
                return open_stored(folder, request)
        loaded = build(request, on_event=on_event)
        try:
            keep(folder, loaded, request)
            on_event(Notice(f"The packed base is kept in {folder}. {sizes}"))
        except PeftkitError as error:
            on_event(Notice(f"The packed base is not kept. {error.asked} {error.found}"))
    return loaded


def packed_size(request: BaseRequest) -> int:
    """Return the bytes of a base in the form of a request."""
    return weight_bytes(request.config, request.settings, request.purpose, request.dtype)


@contextmanager
def packing_alone(folder: Path, on_event: Listener) -> Iterator[bool]:
    """Be the only process that packs a base into a folder.

    Yields:
        Whether this one has waited for another that did just that.
    """
    waited = []

    def wait() -> None:
        waited.append(True)
        on_event(Notice("Another process is packing this base; this one waits for it."))

    with disk.alone(folder, wait):
        yield bool(waited) and (folder / MANIFEST).is_file()


def store_folder() -> Path:
    return cache_folder() / FOLDER


def room_for(num_bytes: int) -> tuple[str, bool]:
    """Return a sentence on the bytes needed and free, and whether little would be left of them.

    Raises:
        OutputError: The cache cannot be written. RunError: The disk has less.
    """
    folder = disk.writable_folder(store_folder())
    disk.check_space(folder, num_bytes)
    free = disk.free_bytes(folder)
    sizes = f"It takes {size(num_bytes)} of {size(free)} that are free in {folder}."
    return sizes, free - num_bytes < LEFT_FREE


def folder_of(request: BaseRequest, *, shared: bool = False) -> Path | None:
    """Return where the cache keeps a base packed in this form; None where it may not.

    Args:
        shared: By several processes: then also one that is not packed, or that has a
            classification head.
    """
    purpose, is_packed = request.purpose, request.settings.quantize != "none"
    if not shared and (not is_packed or purpose.head is not None):
        return None
    checkpoint = published(request.config)
    if checkpoint is not None and not (checkpoint.has_codes and is_packed):
        return None  # bitsandbytes' own, or codes whose files open as fast
    source = files_of(request.location)
    if source is None:
        return None
    head = [repr(each) for each in (purpose.head, purpose.rope_scaling) if each is not None]
    key = json.dumps([str(source.resolve()), purpose.auto_class, _form(request), *head])
    name = re.sub(r"[^\w.-]+", "-", source.name)[:40]
    return store_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer of a model by its name, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def num_bytes(model: nn.Module) -> int:
    """Return the bytes that a packed base takes on the disk."""
    return sum(tensor.nbytes for _, tensor in tensors_of(model))


def keep(folder: Path, built: LoadedModel, request: BaseRequest) -> None:
    """Write a packed base into the cache.

    Raises:
        OutputError, RunError: The cache cannot be written, or the disk is full; nothing is left.
    """
    tensors = dict(tensors_of(built.model))
    disk.writable_folder(folder.parent)
    disk.check_space(folder.parent, num_bytes(built.model))
    try:
        with new_folder(folder, last=MANIFEST) as new:
            specs = specs_of(tensors)
            values = (tensors[spec.name] for spec in specs)
            write_tensor_stream(new / WEIGHTS, specs, values, {"format": "pt"})
            manifest = {
                "version": VERSION,
                "model": request.location.name,
                "fingerprint": built.fingerprint,
                "trunk": built.trunk,
                "head": list(built.head),
                "form": _form(request),
                "stamp": _stamp(request),
                "sha256": disk.sha256_of(new / WEIGHTS),
            }
            disk.write_json(manifest, new / MANIFEST)
    except OSError as error:
        raise OutputError(
            f"cannot write {folder}.", found=str(error), fix="Set PEFTKIT_CACHE to another folder."
        ) from error


def open_stored(folder: Path, request: BaseRequest, *, is_known: bool = False) -> LoadedModel:
    """Open a packed base by mapping its file; on a GPU its tensors are copied there.

    Args:
        is_known: It was written, or opened, right before: its file is not read for its hash.

    Raises:
        BaseError: It is damaged, of another version, or the base's files have changed since.
    """
    manifest = manifest_of(folder)
    if manifest["stamp"] != _stamp(request):
        raise _useless(
            folder, f"The files of {request.location.name} have changed since it was made."
        )
    path = folder / WEIGHTS
    if not path.is_file() or not (is_known or disk.sha256_of(path) == manifest["sha256"]):
        raise _useless(folder, f"{WEIGHTS} is not as it was written.")
    tensors = load_file(path)  # pages of the file
    model = packed_skeleton(request.config, request.settings, request.purpose, request.dtype)
    if problem := fill(model, tensors, request.device):
        raise _useless(folder, problem)
    model.config.dtype = request.dtype
    model.is_quantized = False
    return LoadedModel(
        model.requires_grad_(False).eval(),
        manifest["fingerprint"],
        tuple(manifest["head"]),
        manifest.get("trunk", ""),
    )


def fill(model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> str:
    """Replace a model's tensors without data, tied ones in all of their places.

    Returns:
        What differs between the two, or "".
    """
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


def _form(request: BaseRequest) -> dict[str, Any]:
    settings = request.settings
    embeddings = settings.quantize_embeddings
    return {
        "quantize": settings.quantize,
        "double_quant": settings.double_quant,
        "quantize_towers": settings.quantize_towers,
        **({"embeddings": embeddings} if embeddings != "none" else {}),
        "dtype": str(request.dtype).removeprefix("torch."),
    }


def _stamp(request: BaseRequest) -> dict[str, list[int]]:
    """Return the size and the time of every file that a base is read from."""
    source = files_of(request.location)
    assert source is not None
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    if source.is_file():
        files = [source]
    return {p.name: [(s := os.stat(p)).st_size, s.st_mtime_ns] for p in files if p.is_file()}


def manifest_of(folder: Path) -> dict[str, Any]:
    """Read the manifest of a packed base.

    Raises:
        BaseError: It is not whole, or of another version.
    """
    manifest = disk.read_json(folder / MANIFEST, error=BaseError)
    if manifest.get("version") != VERSION:
        version = f"It is of version {manifest.get('version')} of this format, not {VERSION}."
        raise _useless(folder, version)
    if {"model", "fingerprint", "head", "form", "stamp", "sha256"} - manifest.keys():
        raise _useless(folder, f"{MANIFEST} is not whole.")
    return manifest


def _useless(folder: Path, why: str) -> BaseError:
    fix = f"Remove it: peftkit base rm {folder.name}"
    return BaseError(f"cannot use the packed base {folder.name}.", found=why, fix=fix)
