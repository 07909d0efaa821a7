"""Packed bases in the cache, from where `load_base` opens them: put there, listed, removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peftkit.base.build import build, convert
from peftkit.base.config import BaseConfig
from peftkit.base.locate import locate
from peftkit.base.packed_bases import being_packed, num_bytes, room_for
from peftkit.base.pretrained import oom_as_error, reachable
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import DTYPES, StorageFormat, fast_dtype, request_of
from peftkit.base.skeleton import packed_skeleton
from peftkit.base.store import WEIGHTS, folder_of, keep, manifest_of, store_folder
from peftkit.config.schema import from_dict
from peftkit.errors import BaseError, PeftkitError, RunError
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.execution.environment import default_device
from peftkit.files import disk
from peftkit.files.folders import LOCKS


def pack_base(
    model: str,
    *,
    quantize: str = "nf4",
    dtype: str = "auto",
    revision: str | None = None,
    agree: Callable[[str], bool] = lambda sizes: False,
    on_event: Listener = ignore,
) -> Path:
    """Pack a base of any size into the cache, from where `load_base` opens it.

    Args:
        agree: Asked before anything is downloaded or packed, if little of the disk would be left.

    Raises:
        BaseError: It cannot be packed, or does not fit into memory.
        OutputError, RunError: The cache cannot be written, the disk has too little room, or so
            little that somebody has to agree.
    """
    from_dict(
        BaseConfig, {"model": model, "quantize": quantize, "dtype": dtype}, "peftkit base pack"
    )
    place = default_device()
    form = StorageFormat(quantize, True, DTYPES.get(dtype) or fast_dtype(place), place, False)
    location = reachable(convert(locate(model, revision), on_event))
    wanted = request_of(location, CAUSAL_LM, form)
    folder = folder_of(wanted)
    if folder is None:
        raise BaseError(
            f"{location.name} cannot be kept packed.",
            found="It is packed by bitsandbytes already, or quantize is none.",
            fix="Give a model that is not, and --quantize nf4, fp4 or int8.",
        )
    bare = packed_skeleton(wanted.config, CAUSAL_LM, form)
    sizes, is_tight = room_for(num_bytes(bare))
    if is_tight and not agree(sizes):
        raise RunError(
            f"the packed base {location.name} would leave little of the disk.",
            found=sizes,
            fix="Agree with --yes, make room (peftkit base ls, peftkit base rm), or set "
            "PEFTKIT_CACHE to a folder on another disk.",
        )
    on_event(Notice(sizes))
    on_event(Stage(f"Packing the base {location.name}"))
    with being_packed(folder, on_event) as is_there:
        if not is_there:
            with oom_as_error(location.name):
                built = build(wanted, on_event=on_event)
            keep(folder, built, wanted)
    return folder


@dataclass(frozen=True, slots=True)
class Stored:
    """A packed base in the cache.

    Attributes:
        folder: Where it is. model: What it was made of, as it was asked for.
        quantize, dtype: Its form. num_bytes: On disk. problem: Why it is of no use, or "".
    """

    folder: Path
    model: str
    quantize: str
    dtype: str
    num_bytes: int
    problem: str = ""


def stored_bases() -> list[Stored]:
    """Return every packed base in the cache, and what is wrong with it, if anything."""
    root = store_folder()
    inside = sorted(root.iterdir()) if root.is_dir() else []
    folders = [path for path in inside if path.is_dir() and path.name != LOCKS]
    return [_stored(folder) for folder in folders]


def remove_stored(name: str) -> list[Stored]:
    """Remove packed bases by the name of their folder or of their model.

    Raises:
        BaseError: There is none of that name; lists those that there are.
    """
    known = stored_bases()
    found = [each for each in known if name in (each.folder.name, each.model)]
    if not found:
        listed = "\n".join(f"{each.folder.name} ({each.model})" for each in known)
        raise BaseError(
            f"there is no packed base {name!r}.",
            found=listed or "There is none.",
            fix="Give a name or a model as peftkit base ls shows it.",
        )
    for each in found:
        shutil.rmtree(each.folder)
    return found


def _stored(folder: Path) -> Stored:
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if folder.name.startswith("."):
        return Stored(folder, "?", "?", "?", size, "not finished: being packed, or left behind")
    try:
        manifest = manifest_of(folder)
        with disk.open_tensors(folder / WEIGHTS, error=BaseError):
            problem = ""
    except PeftkitError as error:
        return Stored(folder, "?", "?", "?", size, error.found.splitlines()[0])
    form = manifest["form"]
    return Stored(folder, manifest["model"], form["quantize"], form["dtype"], size, problem)
