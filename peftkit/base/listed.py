"""The packed bases that the cache holds: listed, and removed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from peftkit.base.store import WEIGHTS, manifest_of, store_folder
from peftkit.errors import BaseError, PeftkitError
from peftkit.files import disk
from peftkit.files.folders import LOCKS


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
