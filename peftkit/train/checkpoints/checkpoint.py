"""Checkpoints on disk: whole or not there, proven valid before use, no pickle.

    checkpoints/step-40/            the model's files (see weights.py), optimizer.safetensors,
                                    rng.safetensors, state.json, and MANIFEST.json
    checkpoints/latest              the name of the newest one, for people and scripts
    checkpoints/step-60.tmp-4711/   process 4711 is writing this, or died while it did

A checkpoint is written under a temporary name, MANIFEST.json last, and renamed when every byte is
durable. It is valid if its manifest is unharmed and every file in it has the size and hash that the
manifest says. Resuming looks for the newest valid one; `latest` is not needed for that.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peftkit.errors import CheckpointError, OutputError, RunError
from peftkit.events import Listener, Notice
from peftkit.execution.environment import is_main_process
from peftkit.files.disk import LOCKS, alone, free_bytes, fsync_dir, writable_folder, write_text
from peftkit.train.checkpoints import manifest
from peftkit.train.checkpoints.manifest import Writer

FOLDER, LATEST = "checkpoints", "latest"
HOLDER = "holder"
_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_TEMPORARY = re.compile(r"step-[0-9]+\.(?:tmp|old)-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A valid checkpoint."""

    step: int
    folder: Path
    manifest: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        output_dir: The run's folder; checkpoints lie in `checkpoints/` below it.
        keep: How many of the newest stay, besides the best.
        free: Asked for the free bytes before each save.
    """

    def __init__(
        self, output_dir: Path, keep: int, free: Callable[[Path], int] = free_bytes
    ) -> None:
        self.folder = output_dir / FOLDER
        self.keep, self.free = keep, free
        self._known: dict[int, bool] = {}  # step -> valid, as far as looked at

    def newest_valid(self, on_event: Listener) -> Checkpoint:
        """Return the newest valid checkpoint; a Notice says which were skipped and why.

        Raises:
            CheckpointError: There is none.
        """
        skipped: list[str] = []
        for step in reversed(self.steps()):
            try:
                found = self.verified(step)
            except CheckpointError as error:
                skipped.append(f"{self._path(step).name}: {error.found}")
                on_event(Notice(f"Skipped checkpoint {skipped[-1]}"))
                continue
            return found
        raise self.nothing_to_resume(skipped)

    def nothing_to_resume(self, skipped: Sequence[str]) -> CheckpointError:
        """Return the error that says so, with what was skipped."""
        return CheckpointError(
            f"cannot resume: {self.folder} holds no valid checkpoint",
            found="\n".join(skipped) or "There is none at all.",
            fix="Train from the start: leave out --resume.",
        )

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, valid or not, oldest first."""
        try:
            names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir()]
        except OSError:
            return []
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def verified(self, step: int) -> Checkpoint:
        """Return a checkpoint after hashing all of it; CheckpointError.found says what is wrong."""
        folder = self._path(step)
        self._known[step] = False
        found = manifest.verified(folder)
        if found.get("step") != step:
            raise manifest.invalid(folder, f"its manifest is of step {found.get('step')}")
        self._known[step] = True
        return Checkpoint(step, folder, found)

    def save(
        self,
        step: int,
        writers: Mapping[str, Writer],
        facts: Mapping[str, Any],
        *,
        best_step: int | None,
        num_bytes: int,
    ) -> Path:
        """Write a checkpoint, then delete those that are not to be kept.

        Args:
            writers: Each writes some of the files into the folder it is given.
            facts: What the manifest says besides files, versions and step.
            best_step: Whose checkpoint is kept whatever its age.
            num_bytes: About how much is going to be written.

        Raises:
            RunError: The disk is full or fails. Nothing that was there is lost.
            OutputError: The folder cannot be written to.
        """
        self.check_space(num_bytes)
        final = self._path(step)
        temporary = self.folder / f"{final.name}.tmp-{os.getpid()}"
        try:
            with _disk_errors(final):
                shutil.rmtree(temporary, ignore_errors=True)
                manifest.write_folder(temporary, writers, {**facts, "step": step})
                manifest.failpoint("synced")
                self._publish(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._known[step] = True
        with _disk_errors(final):
            write_text(f"{final.name}\n", self.folder / LATEST)
            manifest.failpoint(LATEST)
            self._delete_old(step, best_step)
        return final

    def check_space(self, num_bytes: int) -> None:
        """Raise RunError if a checkpoint of about this size does not fit on the disk."""
        if (free := self.free(self.folder)) < num_bytes:
            raise RunError(
                f"cannot save a checkpoint in {self.folder}: the disk is full",
                found=f"{num_bytes:,} bytes needed, {free:,} free.",
                fix="Make room, then go on with --resume; earlier checkpoints are untouched.",
            )

    def remove_leftovers(self) -> None:
        """Delete half-written checkpoints of processes that no longer run."""
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.folder)):
                match = _TEMPORARY.fullmatch(entry.name)
                if match and not _is_alive(int(match[1])):
                    shutil.rmtree(entry.path, ignore_errors=True)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give a complete checkpoint its name; one of that name is there only if it is invalid."""
        old = final.with_name(f"{final.name}.old-{os.getpid()}")
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        manifest.failpoint("renamed")
        fsync_dir(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _delete_old(self, newest: int, best_step: int | None) -> None:
        """Delete valid checkpoints beyond the newest; invalid ones are left for people to look at.

        The one just written is valid and stays, so there is always one to resume from.
        """
        for step in self.steps():
            if step not in self._known:
                with contextlib.suppress(CheckpointError):
                    self.verified(step)
        valid = [step for step in self.steps() if self._known.get(step)]
        for step in valid[: -self.keep]:
            if step not in (newest, best_step):
                # under another name first: a deletion that is cut short leaves no half checkpoint
                old = self._path(step).with_name(f"step-{step}.old-{os.getpid()}")
                self._path(step).rename(old)
                del self._known[step]
                shutil.rmtree(old, ignore_errors=True)
                manifest.failpoint("deleted")
        fsync_dir(self.folder)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """What becomes of a run that is in the output folder already.

    Attributes:
        resume: Continue from its newest valid checkpoint.
        overwrite: Delete its checkpoints, once the new run can begin.
        allow_changes: Dotted keys of the identity, "train" or "rows" that may differ from it.

    Raises:
        CheckpointError: There is no way to do all that was asked.
    """

    resume: bool = False
    overwrite: bool = False
    allow_changes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise CheckpointError("a run is either resumed or overwritten, not both")
        if self.allow_changes and not self.resume:
            fix = "Add --resume, or leave out --allow-changes."
            raise CheckpointError("changes can only be allowed to a run that is resumed", fix=fix)


def prepare_output(output_dir: Path, start: StartPolicy) -> None:
    """Make sure, before anything heavy, that a run can write its results and destroys no others.

    Raises:
        OutputError: The folder cannot be written to, or holds a run.
        CheckpointError: There is nothing to resume.
    """
    checkpoints = Checkpoints(output_dir, keep=1)
    found = [f"step-{step}" for step in checkpoints.steps()]
    if start.resume and not found:
        raise checkpoints.nothing_to_resume([])
    writable_folder(output_dir)
    found += sorted(path.name for path in output_dir.glob("*.safetensors"))
    if found and not (start.resume or start.overwrite):
        raise OutputError(
            f"{output_dir} already holds a run",
            found=", ".join(found[-4:]),
            fix="Go on with it (--resume), train into another folder (--out DIR), or start "
            "again in this one (--overwrite).",
        )
    writable_folder(checkpoints.folder)


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Keep other runs from training into a folder meanwhile; the main process of a run does it.

    Raises:
        OutputError: One does; names it.
    """
    if not is_main_process():
        yield
        return
    holder = output_dir / LOCKS / HOLDER

    def refuse() -> None:
        found = ""
        with contextlib.suppress(OSError):
            found = holder.read_text(encoding="utf-8").strip()
        raise OutputError(
            f"another process is training into {output_dir}",
            found=found,
            fix="Wait for its end, or train into another folder (--out DIR).",
        )

    with alone(output_dir / "run", on_wait=refuse):
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        write_text(f"Process {os.getpid()} on {platform.node()}, since {began}.\n", holder)
        try:
            yield
        finally:
            holder.unlink(missing_ok=True)


def delete_checkpoints(output_dir: Path) -> None:
    """Delete the checkpoints of a run that is to be overwritten; OutputError where it fails."""
    checkpoints = Checkpoints(output_dir, keep=1)
    shutil.rmtree(checkpoints.folder, ignore_errors=True)
    if checkpoints.steps():
        raise OutputError(f"cannot delete the run in {output_dir}", fix="Delete it by hand.")
    writable_folder(checkpoints.folder)


def _is_alive(pid: int) -> bool:
    """Tell whether another process with this id is running."""
    if pid == os.getpid():
        return False
    if sys.platform == "win32":  # there os.kill ends it, whatever the signal
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
    """Turn what the system or a writer says about the disk into RunError or OutputError."""
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
            fix="Earlier checkpoints are untouched: mend the disk, then go on with --resume.",
        ) from error
