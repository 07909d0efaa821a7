"""Checkpoints on disk: complete or absent, verified before use, no pickle.

    checkpoints/step-40/            the model's files (see `Weights`), optimizer.safetensors,
                                    rng.safetensors, state.json, MANIFEST.json; see `Saver`
    checkpoints/latest              the name of the newest one, for people and scripts
    checkpoints/step-60.tmp-4711/   incomplete: process 4711 is writing it, or was killed

A checkpoint is written under a temporary name, MANIFEST.json last, and renamed when every byte is
durable. MANIFEST.json holds the size and hash of every file, and a hash of itself; a checkpoint is
valid if all of them match. A resumed run uses the newest valid one and does not read `latest`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from peftkit.errors import CheckpointError, DiskFullError, OutputError, RunError
from peftkit.events import Listener, Notice
from peftkit.files.disk import (
    free_bytes,
    fsync_dir,
    fsync_file,
    read_json,
    sha256_of,
    write_json,
    write_text,
)
from peftkit.files.strict_json import JsonMap

FOLDER, LATEST = "checkpoints", "latest"
SCHEMA = 1
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 1 << 24
LIBRARIES = ("peftkit", "torch", "transformers", "accelerate", "bitsandbytes")
_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_TEMPORARY = re.compile(r"step-[0-9]+\.(?:tmp|old)-([0-9]+)")


def failpoint(name: str) -> None:
    """Do nothing after each write of a save; tests replace it by a crash."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of libraries that may affect the numbers of a run."""
    installed = {"python": platform.python_version()}
    for library in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[library] = metadata.version(library)
    return installed


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A valid checkpoint."""

    step: int
    folder: Path
    manifest: JsonMap


class Checkpoints:
    """The checkpoints of one run.

    Args:
        output_dir: The run's folder, with the checkpoints in its subfolder `checkpoints/`.
        keep: Number of newest checkpoints to keep; the best one is also kept.
    """

    def __init__(self, output_dir: Path, keep: int = 1) -> None:
        self.folder = output_dir / FOLDER
        self.keep = keep
        self._is_valid: dict[int, bool] = {}  # by step, of verified checkpoints

    @property
    def free_bytes(self) -> int:
        """Free bytes on the disk of the checkpoints."""
        return free_bytes(self.folder)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, valid or not, oldest first."""
        try:
            names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir()]
        except OSError:
            return []
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def newest_valid(self, on_event: Listener) -> Checkpoint:
        """Return the newest valid checkpoint; emit a Notice with the reason for each skipped one.

        Raises:
            CheckpointError: There is no valid checkpoint.
        """
        skipped: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.verified(step)
            except CheckpointError as error:
                skipped.append(f"{self.path(step).name}: {error.found}")
                on_event(Notice(f"Skipped checkpoint {skipped[-1]}"))
        raise self.nothing_to_resume(skipped)

    def nothing_to_resume(self, skipped: Sequence[str] = ()) -> CheckpointError:
        """Return the error for a run without a valid checkpoint."""
        return CheckpointError(
            f"cannot resume: {self.folder} holds no valid checkpoint",
            found="\n".join(skipped) or "There are no checkpoints.",
            fix="Train from the start: leave out --resume.",
        )

    def verified(self, step: int) -> Checkpoint:
        """Return a checkpoint after hashing all of its files.

        Raises:
            CheckpointError: It is not valid; `found` has the reason.
        """
        folder = self.path(step)
        self._is_valid[step] = False
        manifest = _verified_manifest(folder)
        if manifest.get("step") != step:
            raise _invalid(folder, f"its manifest is of step {manifest.get('step')}")
        self._is_valid[step] = True
        return Checkpoint(step, folder, manifest)

    @contextlib.contextmanager
    def writing(
        self, step: int, facts: Mapping[str, object], *, best_step: int | None, num_bytes: int
    ) -> Iterator[Path]:
        """Yield a folder to write files into; then publish it and delete old checkpoints.

        Args:
            facts: Fields of the manifest besides files, versions and step.
            best_step: Its checkpoint is not deleted.
            num_bytes: Estimated size.

        Raises:
            RunError: The disk is full or fails; earlier checkpoints are untouched.
            OutputError: The folder cannot be written to.
        """
        if (free := self.free_bytes) < num_bytes:
            raise DiskFullError(
                f"cannot save a checkpoint in {self.folder}: the disk is full",
                found=f"{num_bytes:,} bytes needed, {free:,} free.",
                fix="Free some space, then continue with --resume; earlier checkpoints are valid.",
            )
        final = self.path(step)
        temporary = self.folder / f"{final.name}.tmp-{os.getpid()}"
        try:
            with _disk_errors(final):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                failpoint("created")
                yield temporary
                _seal(temporary, {**facts, "step": step})
                failpoint("synced")
                self._publish(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._is_valid[step] = True
        with _disk_errors(final):
            write_text(f"{final.name}\n", self.folder / LATEST)
            failpoint(LATEST)
            self._delete_old(step, best_step)

    def delete_all(self) -> None:
        """Delete all checkpoints, and leave other files of the folder."""
        for step in self.steps():
            shutil.rmtree(self.path(step), ignore_errors=True)
        (self.folder / LATEST).unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Delete half-written checkpoints of processes that no longer run."""
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.folder)):
                match = _TEMPORARY.fullmatch(entry.name)
                if match and not _is_alive(int(match[1])):
                    shutil.rmtree(entry.path, ignore_errors=True)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Rename a complete checkpoint; an existing folder with its name is invalid."""
        old = final.with_name(f"{final.name}.old-{os.getpid()}")
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        failpoint("renamed")
        fsync_dir(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _delete_old(self, newest: int, best_step: int | None) -> None:
        """Delete valid checkpoints beyond the newest; keep invalid ones for inspection.

        The newest one is valid and stays, so a run can always be resumed.
        """
        for step in self.steps():
            if step not in self._is_valid:
                with contextlib.suppress(CheckpointError):
                    self.verified(step)
        valid = [step for step in self.steps() if self._is_valid.get(step)]
        for step in valid[: -self.keep]:
            if step not in (newest, best_step):
                # renamed first: an interrupted deletion must not leave an incomplete checkpoint
                old = self.path(step).with_name(f"step-{step}.old-{os.getpid()}")
                self.path(step).rename(old)
                del self._is_valid[step]
                shutil.rmtree(old, ignore_errors=True)
                failpoint("deleted")
        fsync_dir(self.folder)


def _seal(folder: Path, facts: Mapping[str, object]) -> None:
    """Write the manifest of a folder's files; return when every byte is durable."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        fsync_file(path)
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


def _verified_manifest(folder: Path) -> dict[str, object]:
    """Return a folder's manifest after hashing every file in it."""
    manifest = _read_manifest(folder)
    for name, (size, digest) in _listed_files(folder, manifest).items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise _invalid(folder, f"{name} is missing")
        if path.stat().st_size != size:
            raise _invalid(folder, f"{name} has {path.stat().st_size:,} bytes, not {size:,}")
        if sha256_of(path) != digest:
            raise _invalid(folder, f"{name} has changed since it was written (sha256)")
    return manifest


def _invalid(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{folder} is not a valid checkpoint", found=reason)


def _read_manifest(folder: Path) -> dict[str, object]:
    if not (folder / MANIFEST).exists():
        raise _invalid(folder, f"{MANIFEST} is missing: the folder was never complete")
    try:
        manifest = read_json(folder / MANIFEST, max_bytes=MAX_MANIFEST_BYTES, error=CheckpointError)
    except CheckpointError as error:
        raise _invalid(folder, f"{MANIFEST} is unreadable: {error.found}") from None
    if manifest.get("schema") != SCHEMA:
        raise _invalid(folder, f"its schema is {manifest.get('schema')!r}, this is {SCHEMA}")
    if manifest.pop("sha256", None) != _digest(manifest):
        raise _invalid(folder, f"{MANIFEST} has changed since it was written (sha256)")
    return manifest


def _listed_files(folder: Path, manifest: JsonMap) -> dict[str, tuple[int, str]]:
    """Return name -> (bytes, sha256) of the files in a manifest whose hash is right."""
    try:
        return {n: (int(f["bytes"]), str(f["sha256"])) for n, f in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _invalid(folder, f"{MANIFEST} does not list its files") from None


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _is_alive(pid: int) -> bool:
    """Return whether another process with this id is running."""
    if pid == os.getpid():
        return False
    if sys.platform == "win32":  # os.kill ends the process there, with any signal
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Convert disk errors to RunError or OutputError."""
    try:
        yield
    except (RunError, OutputError):
        raise
    except PermissionError as error:
        raise OutputError(f"cannot write {path}", found=str(error)) from error
    except OSError as error:
        raise RunError(
            f"cannot write {path}",
            found=f"{error}; {free_bytes(path.parent):,} bytes free.",
            fix="Repair the disk, then continue with --resume; earlier checkpoints are valid.",
        ) from error
