"""Packed bases in the cache (store.py): list, remove and add."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from peftkit.base.build import build
from peftkit.base.load import find_base
from peftkit.base.pretrained import oom_as_error
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import request_of
from peftkit.base.store import (
    WEIGHTS,
    folder_of,
    keep,
    manifest_of,
    packed_size,
    packing_alone,
    room_for,
    store_folder,
)
from peftkit.config.schema import from_dict
from peftkit.errors import BaseError, PeftkitError
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.execution.environment import select_device
from peftkit.files.disk import LOCKS
from peftkit.files.tensors import open_tensors
from peftkit.settings import BaseConfig


def pack_base(
    model: str,
    *,
    quantize: str = "nf4",
    dtype: str = "auto",
    revision: str | None = None,
    on_event: Listener = ignore,
) -> Path:
    """Pack a base of any size into the cache, where `load_base` finds it.

    Raises:
        BaseError: The base cannot be packed, or does not fit into memory.
        OutputError, RunError: The cache cannot be written, or the disk is too full.
    """
    given = {"model": model, "revision": revision, "quantize": quantize, "dtype": dtype}
    settings = from_dict(BaseConfig, given, "peftkit base pack")
    location = find_base(model, revision, on_event)
    request = request_of(settings, CAUSAL_LM, location, select_device())
    folder = folder_of(request)
    if folder is None:
        raise BaseError(
            f"{location.name} cannot be stored packed.",
            found="It is packed by bitsandbytes already, or quantize is none.",
            fix="Use an unquantised model, and --quantize nf4, fp4 or int8.",
        )
    sizes, _ = room_for(packed_size(request))
    on_event(Notice(sizes))
    on_event(Stage(f"Packing the base {location.name}"))
    with packing_alone(folder, on_event) as is_there:
        if not is_there:
            with oom_as_error(location.name):
                loaded = build(request, on_event=on_event)
            keep(folder, loaded, request)
    return folder


@dataclass(frozen=True, slots=True)
class Stored:
    """A packed base in the cache.

    Attributes:
        folder: Its folder. model: The base's name in the request.
        quantize, dtype: Its format. num_bytes: Bytes on disk.
        problem: Reason why it cannot be used, or "".
    """

    folder: Path
    model: str
    quantize: str
    dtype: str
    num_bytes: int
    problem: str = ""


def stored_bases() -> list[Stored]:
    """Return every packed base in the cache."""
    root = store_folder()
    inside = sorted(root.iterdir()) if root.is_dir() else []
    folders = [path for path in inside if path.is_dir() and path.name != LOCKS]
    return [_stored(folder) for folder in folders]


def remove_stored(name: str) -> list[Stored]:
    """Remove packed bases by the name of their folder or of their model.

    Raises:
        BaseError: No packed base has that name; the error lists the existing ones.
    """
    bases = stored_bases()
    matching = [base for base in bases if name in (base.folder.name, base.model)]
    if not matching:
        listed = "\n".join(f"{base.folder.name} ({base.model})" for base in bases)
        raise BaseError(
            f"there is no packed base {name!r}.",
            found=listed or "There are no packed bases.",
            fix="Use a name or a model that peftkit base ls lists.",
        )
    for base in matching:
        shutil.rmtree(base.folder)
    return matching


def _stored(folder: Path) -> Stored:
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if folder.name.startswith("."):
        return Stored(
            folder,
            "?",
            "?",
            "?",
            size,
            "incomplete: being packed now, or left by an interrupted run",
        )
    try:
        manifest = manifest_of(folder)
        with open_tensors(folder / WEIGHTS, error=BaseError):
            problem = ""
    except PeftkitError as error:
        return Stored(folder, "?", "?", "?", size, error.found.splitlines()[0])
    form = manifest["form"]
    return Stored(folder, manifest["model"], form["quantize"], form["dtype"], size, problem)
