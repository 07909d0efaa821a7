"""Packed bases in the cache, opened by memory-mapping their files.

Each base has a folder for each quantisation: `model.safetensors` with every parameter and buffer of
the packed model, and `store.json`, which identifies the base's files. A folder is complete or
absent. It is valid until its files or the base's files change. Processes that open the same folder
share its memory pages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from peftkit.base.build import LoadedModel, build
from peftkit.base.pretrained import files_of, published
from peftkit.base.request import BaseRequest
from peftkit.base.skeleton import packed_skeleton, weight_bytes
from peftkit.errors import BaseError, OutputError, PeftkitError
from peftkit.events import Listener, Notice
from peftkit.figures import dtype_name, size
from peftkit.files import disk
from peftkit.files.disk import cache_folder, new_folder
from peftkit.files.strict_json import Json
from peftkit.files.tensors import specs_of, write_tensor_stream

VERSION = 3
WEIGHTS, MANIFEST, FOLDER = "model.safetensors", "store.json", "packed"
RESERVED_BYTES = 10_000_000_000
"""Free bytes of the disk that only `peftkit base pack` may use."""
MIN_STORED_BYTES = 500_000_000
"""Minimum bytes of a packed base for the cache; smaller ones are packed within seconds."""


def open_or_build(request: BaseRequest, on_event: Listener) -> LoadedModel:
    """Open the packed base in the cache, or build it from its files.

    Raises:
        BaseError: See `build`.
    """
    folder = folder_of(request) if request.settings.store == "auto" else None
    if folder is None:
        return build(request, on_event=on_event)
    is_stored = (folder / MANIFEST).is_file()
    if is_stored:
        try:
            return open_stored(folder, request)
        except BaseError as error:
            on_event(Notice(f"The base is packed again. {error.problem} {error.found}"))
    num_bytes = packed_size(request)
    if num_bytes < MIN_STORED_BYTES and not is_stored:
        return build(request, on_event=on_event)
    return _build_and_keep(folder, num_bytes, request, on_event)


def _build_and_keep(
    folder: Path, num_bytes: int, request: BaseRequest, on_event: Listener
) -> LoadedModel:
    """Build a base, and store it in the cache if the disk has room for it."""
    try:
        sizes, is_tight = room_for(num_bytes)
        pack = f"To store it anyway: peftkit base pack {request.location.name}"
        problem = f"{sizes} {pack}" if is_tight else ""
    except PeftkitError as error:  # the run does not need the cache
        problem = f"{error.problem} {error.found}"
    if problem:
        on_event(Notice(f"The packed base is not stored. {problem}"))
        return build(request, on_event=on_event)
    with packing_alone(folder, on_event) as is_stored:
        if is_stored:
            with suppress(BaseError):
                return open_stored(folder, request)
        loaded = build(request, on_event=on_event)
        try:
            keep(folder, loaded, request)
            on_event(Notice(f"The packed base is stored in {folder}. {sizes}"))
        except PeftkitError as error:
            on_event(Notice(f"The packed base is not stored. {error.problem} {error.found}"))
    return loaded


def packed_size(request: BaseRequest) -> int:
    """Return the bytes of a base in the requested form."""
    return weight_bytes(request.config, request.settings, request.purpose, request.dtype)


@contextmanager
def packing_alone(folder: Path, on_event: Listener) -> Iterator[bool]:
    """Lock a folder while a base is packed into it.

    Yields:
        Whether another process has packed the base in the meantime.
    """
    has_waited = []

    def wait() -> None:
        has_waited.append(True)
        on_event(Notice("Another process is packing this base; this one waits for it."))

    with disk.alone(folder, wait):
        yield bool(has_waited) and (folder / MANIFEST).is_file()


def store_folder() -> Path:
    return cache_folder() / FOLDER


def room_for(num_bytes: int) -> tuple[str, bool]:
    """Return a sentence on required and free bytes, and whether too few would remain free.

    Raises:
        OutputError: The cache cannot be written.
        RunError: The disk has less space.
    """
    folder = disk.writable_folder(store_folder())
    disk.check_space(folder, num_bytes)
    free = disk.free_bytes(folder)
    sizes = f"It takes {size(num_bytes)} of the free {size(free)} in {folder}."
    return sizes, free - num_bytes < RESERVED_BYTES


def folder_of(request: BaseRequest, *, shared: bool = False) -> Path | None:
    """Return the cache's folder for a request; None if such a base is never stored.

    Args:
        shared: Whether several processes share it. If so, unpacked bases and bases with a
            classification head are also stored.
    """
    purpose, is_packed = request.purpose, request.settings.quantize != "none"
    if not shared and (not is_packed or purpose.head is not None):
        return None
    checkpoint = published(request.config)
    if checkpoint is not None and not (checkpoint.has_codes and is_packed):
        return None  # bitsandbytes, or codes whose files open as fast
    source = files_of(request.location)
    if source is None:
        return None
    head = [repr(value) for value in (purpose.head, purpose.rope_scaling) if value is not None]
    key = json.dumps([str(source.resolve()), purpose.auto_class, _form(request), *head])
    name = re.sub(r"[^\w.-]+", "-", source.name)[:40]
    return store_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of every parameter and buffer of a model, without duplicates."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def num_bytes(model: nn.Module) -> int:
    """Return the bytes that a packed base takes on the disk."""
    return sum(tensor.nbytes for _, tensor in tensors_of(model))


def keep(folder: Path, built: LoadedModel, request: BaseRequest) -> None:
    """Write a packed base into the cache.

    Raises:
        OutputError, RunError: The cache cannot be written, or the disk is full; no file is left.
    """
    tensors = dict(tensors_of(built.model))
    disk.writable_folder(folder.parent)
    disk.check_space(folder.parent, num_bytes(built.model))
    try:
        if not (folder / MANIFEST).exists():  # left by a kill
            (folder / WEIGHTS).unlink(missing_ok=True)
        with new_folder(folder, last=MANIFEST, replaced={WEIGHTS}.__contains__) as new:
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
    """Open a packed base by memory-mapping its file; for a GPU its tensors are copied.

    Args:
        is_known: Whether to skip the check of its hash, since it was just written or opened.

    Raises:
        BaseError: It is damaged or has another version, or the base's files have changed.
    """
    manifest = manifest_of(folder)
    if manifest["stamp"] != _stamp(request):
        raise _useless(
            folder, f"The files of {request.location.name} have changed since it was stored."
        )
    path = folder / WEIGHTS
    if not path.is_file() or not (is_known or disk.sha256_of(path) == manifest["sha256"]):
        raise _useless(folder, f"{WEIGHTS} has changed since it was written.")
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
    """Replace a model's meta tensors, including all uses of tied tensors.

    Returns:
        The difference between the model's tensors and the given ones, or "".
    """
    expected = dict(tensors_of(model))
    differing = expected.keys() ^ tensors.keys()
    differing |= {n for n in expected.keys() & tensors if expected[n].shape != tensors[n].shape}
    if differing:
        return f"Its tensors are not the model's, for example {sorted(differing)[0]}."
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
    missing = without_data(model)
    return f"It has no value for {missing}." if missing else ""


def without_data(model: nn.Module) -> str:
    """Return the path of an attribute that is a meta tensor, or ""."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.device.type == "meta":
                return f"{path}.{name}"
    return ""


def _form(request: BaseRequest) -> Json:
    settings = request.settings
    embeddings = settings.quantize_embeddings
    return {
        "quantize": settings.quantize,
        "double_quant": settings.double_quant,
        "quantize_towers": settings.quantize_towers,
        **({"embeddings": embeddings} if embeddings != "none" else {}),
        "dtype": dtype_name(request.dtype),
    }


def _stamp(request: BaseRequest) -> dict[str, list[int]]:
    """Return the size and modification time of every file of a base."""
    source = files_of(request.location)
    assert source is not None
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    if source.is_file():
        files = [source]
    return {p.name: [(s := os.stat(p)).st_size, s.st_mtime_ns] for p in files if p.is_file()}


def manifest_of(folder: Path) -> Json:
    """Read the manifest of a packed base.

    Raises:
        BaseError: It is incomplete or has another version.
    """
    manifest = disk.read_json(folder / MANIFEST, error=BaseError)
    if manifest.get("version") != VERSION:
        version = f"It has version {manifest.get('version')} of this format, not {VERSION}."
        raise _useless(folder, version)
    if {"model", "fingerprint", "head", "form", "stamp", "sha256"} - manifest.keys():
        raise _useless(folder, f"{MANIFEST} is incomplete.")
    return manifest


def _useless(folder: Path, problem: str) -> BaseError:
    fix = f"Remove it: peftkit base rm {folder.name}"
    return BaseError(f"cannot use the packed base {folder.name}.", found=problem, fix=fix)
