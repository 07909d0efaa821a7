"""A folder that proves its own content: MANIFEST.json holds every file's size and hash."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from peftkit.errors import CheckpointError
from peftkit.files.disk import fsync_dir, fsync_file, read_json, sha256_of, write_json

SCHEMA = 1
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 1 << 24
LIBRARIES = ("peftkit", "torch", "transformers", "accelerate", "bitsandbytes")

Writer = Callable[[Path], None]


def failpoint(name: str) -> None:
    """Do nothing. Tests put a crash in its place; called after each write of a save."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that the numbers of a run may depend on."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[library] = metadata.version(library)
    return found


def write_folder(folder: Path, writers: Mapping[str, Writer], facts: Mapping[str, Any]) -> None:
    """Write files, then the manifest, into a new folder; return when every byte is durable."""
    folder.mkdir()
    failpoint("made")
    for name, write in writers.items():
        write(folder)
        failpoint(name)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        fsync_file(path)  # whoever wrote it
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        for path in paths
    }
    manifest = {"schema": SCHEMA, **facts, "versions": versions(), "files": files}
    write_json({**manifest, "sha256": _digest(manifest)}, folder / MANIFEST)
    failpoint(MANIFEST)
    for inner in {path.parent for path in paths} | {folder}:
        fsync_dir(inner)


def verified(folder: Path) -> dict[str, Any]:
    """Return a folder's manifest after hashing every file of it.

    Raises:
        CheckpointError: `found` says what is wrong.
    """
    manifest = _read_manifest(folder)
    for name, (size, digest) in _listed_files(folder, manifest).items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise invalid(folder, f"{name} is missing")
        if path.stat().st_size != size:
            raise invalid(folder, f"{name} has {path.stat().st_size:,} bytes, not {size:,}")
        if sha256_of(path) != digest:
            raise invalid(folder, f"{name} has changed since it was written (sha256)")
    return manifest


def invalid(folder: Path, reason: str) -> CheckpointError:
    """Return the error for a folder that is not what it should be."""
    return CheckpointError(f"{folder} is not a valid checkpoint", found=reason)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).exists():
        raise invalid(folder, f"{MANIFEST} is missing: the folder was never complete")
    try:
        manifest = read_json(folder / MANIFEST, max_bytes=MAX_MANIFEST_BYTES, error=CheckpointError)
    except CheckpointError as error:
        raise invalid(folder, f"{MANIFEST} is unreadable: {error.found}") from None
    if manifest.get("schema") != SCHEMA:
        raise invalid(folder, f"its schema is {manifest.get('schema')!r}, this is {SCHEMA}")
    if manifest.pop("sha256", None) != _digest(manifest):
        raise invalid(folder, f"{MANIFEST} has changed since it was written (sha256)")
    return manifest


def _listed_files(folder: Path, manifest: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Return name -> (bytes, sha256) of the files of a manifest whose hash is right."""
    try:
        return {n: (int(f["bytes"]), str(f["sha256"])) for n, f in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise invalid(folder, f"{MANIFEST} does not list its files") from None


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
