"""Files and folders: read regular files and strict JSON, and write atomically.

A write goes to a temporary file or folder in the same parent: fsync, rename, fsync of the parent.
After a crash, a full disk or a signal, either the old or the new version exists.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from peftkit.errors import (
    AdapterError,
    DiskFullError,
    OutputError,
    PeftkitError,
    RunError,
    first_few,
)
from peftkit.files.strict_json import Json, parse_json

ErrorType = type[PeftkitError]
MAX_JSON_BYTES = 1 << 20


def open_regular(path: Path, *, error: ErrorType = AdapterError) -> BinaryIO:
    """Open a regular file or a symlink to one; raise `error` for anything else."""
    message = f"cannot read {path}"
    try:
        mode = os.stat(path).st_mode  # before open, since opening a fifo waits for a writer
        # SIM115: the caller closes it
        file = open(path, "rb") if stat.S_ISREG(mode) else None  # noqa: SIM115
    except FileNotFoundError:
        broken = os.path.islink(path)
        reason = "It is a broken symbolic link." if broken else "There is no such file."
        raise error(message, found=reason) from None
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
        raise error(message, found=str(problem)) from None
    if file is None:
        kind = "a folder" if stat.S_ISDIR(mode) else "a fifo, socket or device"
        raise error(message, found=f"It is {kind}.", fix="Give a regular file.")
    return file


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(
    path: Path, *, max_bytes: int = MAX_JSON_BYTES, error: ErrorType = AdapterError
) -> Json:
    """Read a strict JSON object (see `parse_json`); raise `error` for anything else."""
    with open_regular(path, error=error) as file:
        data = file.read(max_bytes + 1)
    message = f"cannot read {path} as JSON"
    if len(data) > max_bytes:
        raise error(message, found=f"It is larger than {max_bytes:,} bytes.")
    return parse_json(data, message, error=error)


def fsync_file(path: Path) -> None:
    """Flush a file written by a library to disk."""
    with open(path, "rb+") as file:  # Windows flushes only files open for writing
        os.fsync(file.fileno())


def fsync_dir(folder: Path) -> None:
    """Flush a folder to disk, including its renames."""
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return peftkit's cache: PEFTKIT_CACHE, XDG_CACHE_HOME/peftkit, or ~/.cache/peftkit."""
    folder, shared = (os.environ.get(name) for name in ("PEFTKIT_CACHE", "XDG_CACHE_HOME"))
    return Path(folder or f"{shared or '~/.cache'}/peftkit").expanduser()


def free_bytes(folder: Path) -> int:
    """Return the free space of the file system that holds `folder`."""
    return shutil.disk_usage(folder).free


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise DiskFullError if a disk has less free space than needed."""
    if num_bytes > (free := free_bytes(folder)):
        raise DiskFullError(
            f"cannot write to {folder}",
            found=f"The disk is full: {num_bytes:,} bytes needed, {free:,} free.",
            fix="Make room, or choose another output folder.",
        )


def is_disk_full(error: Exception) -> bool:
    """Return whether an error means a full disk: a retry works once there is room."""
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return is_full or isinstance(error, DiskFullError)


def writable_folder(folder: Path) -> Path:
    """Create a folder if needed and check that it is writable; else raise OutputError."""
    message = f"cannot write into {folder}"
    fix = "Choose another output folder."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise OutputError(message, found="There is a file of that name.", fix=fix) from None
    except OSError as problem:
        raise OutputError(message, found=str(problem), fix=fix) from None
    return folder


def check_folder(folder: Path) -> None:
    """Raise OutputError if a folder cannot be created or written to; create nothing."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        kind = "not writable" if nearest.is_dir() else "a file"
        raise OutputError(
            f"cannot write into {folder}",
            found=f"{nearest} is {kind}.",
            fix="Choose another output folder.",
        )


@contextlib.contextmanager
def replacing(path: Path, num_bytes: int) -> Iterator[BinaryIO]:
    """Yield a file that atomically replaces `path` if the block succeeds.

    After an exception, the old file exists and no partial file remains. A symbolic link at `path`
    is refused: following it would write elsewhere, replacing it would lose it.

    Raises:
        OutputError: `path` cannot be written.
        RunError: The disk is full or broken.
    """
    message = f"cannot write {path}"
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
        kind = "a symbolic link" if os.path.islink(path) else "not a regular file"
        raise OutputError(message, found=f"It exists and is {kind}.", fix="Remove it first.")
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        # "x": never write through an existing link; the umask sets the permissions
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(problem, OSError):
            raise _write_error(problem, message, path.parent, num_bytes) from problem
        raise


def _write_error(problem: OSError, message: str, folder: Path, num_bytes: int) -> PeftkitError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = f"The disk is full: {num_bytes:,} bytes needed, {free_bytes(folder):,} free."
        if problem.errno != errno.ENOSPC:
            reason += f"\n{problem.strerror} (a quota, or ulimit -f)."
        kind = DiskFullError if problem.errno == errno.ENOSPC else RunError
        return kind(message, found=reason, fix="Make room, or choose another output folder.")
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
        return OutputError(message, found=str(problem), fix="Choose another output folder.")
    return RunError(message, found=str(problem))


def write_bytes_atomic(data: bytes, path: Path) -> None:
    """Write a file atomically."""
    with replacing(path, len(data)) as file:
        file.write(data)


def write_text(text: str, path: Path) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes_atomic(text.encode("utf-8"), path)


def write_json(value: Mapping[str, object], path: Path) -> None:
    """Write an object as sorted, indented JSON; raise RunError for NaN and Infinity."""
    try:
        text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    except ValueError as problem:
        raise RunError(f"cannot write {path}", found=str(problem)) from None
    write_text(text + "\n", path)


@contextlib.contextmanager
def new_folder(out: Path, *, last: str, replaced: Callable[[str], bool]) -> Iterator[Path]:
    """Yield an empty folder, whose files move to `out` if the block succeeds.

    Otherwise `out` is unchanged. An existing `out` is filled, not replaced, since it may be a mount
    point: other files and folders in it stay.

    Args:
        last: File that all readers of `out` require. It is removed first and moved last, so a
            partially replaced folder is never read. Without it `out` is no earlier version of the
            output: none of its files is replaced.
        replaced: Whether a file of this name in an earlier version is removed if there is no new
            one.

    Raises:
        OutputError: The folder cannot be written into, or is no earlier version and holds a file
            whose name is needed.
    """
    parent = writable_folder(out if out.exists() else out.parent)
    folder = parent / f".{out.name}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
        for path in folder.rglob("*"):  # libraries do not flush their files
            if path.is_file():
                fsync_file(path)
        if parent == out or out.exists():
            _move_into(folder, out, last, replaced)
        else:
            os.replace(folder, out)
        fsync_dir(parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move_into(folder: Path, out: Path, last: str, replaced: Callable[[str], bool]) -> None:
    names = sorted(path.name for path in folder.iterdir())
    is_earlier = (out / last).is_file()
    foreign = [] if is_earlier else [name for name in names if os.path.lexists(out / name)]
    if foreign:
        raise OutputError(
            f"cannot write into {out}",
            found=f"It holds files of another origin: {first_few(foreign, 5, ', ')}.",
            fix="Choose another output folder.",
        )
    if is_earlier:
        (out / last).unlink()
        for path in out.iterdir():
            if path.is_file() and replaced(path.name) and path.name not in names:
                path.unlink()
    for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
        if path.is_dir():
            shutil.rmtree(out / path.name, ignore_errors=True)
        os.replace(path, out / path.name)
    fsync_dir(out)


LOCKS = ".locks"
"""Folder of lock files, next to the locked files; some systems cannot remove them."""
RUN_LOCK = "run"
"""Name of the lock that a training run holds in its output folder."""


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file or folder; see `alone`."""
    from filelock import FileLock, Timeout

    lock = path.parent / LOCKS / path.name
    if not lock.exists():
        return False
    try:
        with FileLock(lock).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # a read-only folder, or a file system without locks
        return False


@contextlib.contextmanager
def alone(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of a file or folder; wait if another process holds it.

    The system releases the lock of a killed process. On file systems without locks, nothing waits.

    Args:
        path: A path in an existing folder; it need not exist itself.
        on_wait: Called before waiting; an exception from it cancels the wait.
    """
    from filelock import FileLock, Timeout  # a dependency of datasets

    (path.parent / LOCKS).mkdir(exist_ok=True)
    lock = FileLock(path.parent / LOCKS / path.name)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.acquire(timeout=0))
        except Timeout:
            on_wait()
            stack.enter_context(lock.acquire(poll_interval=0.2))
        except NotImplementedError:
            pass
        yield


HOLDER = "holder"
"""File in LOCKS that describes the process that trains into a folder."""
_HOLDER = re.compile(r"Process (\d+) on (.+?), since (.+?)\.")
CLOCK_SECONDS = 3.0
"""Tolerance of start times, which are rounded to seconds."""


class Trainer(NamedTuple):
    """The process that holds the lock of a run's folder; `is_local`: visible from this process."""

    pid: int
    is_local: bool


def write_holder(folder: Path) -> None:
    """Write that this process trains into a folder, whose lock it holds."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"Process {os.getpid()} on {platform.node()}, since {now}.\n"
    write_text(text, folder / LOCKS / HOLDER)


def trainer_of(folder: Path) -> Trainer | None:
    """Return the process that trains into a folder; None: there is none.

    The lock is read and not tried: trying it would refuse a run that starts at that moment. After
    a crash, the file remains, and its process id may belong to another program: a process that
    started after the file was written, or that is not Python, does not count.
    """
    try:
        match = _HOLDER.match((folder / LOCKS / HOLDER).read_text(encoding="utf-8"))
        since = time.mktime(time.strptime(match[3], "%Y-%m-%d %H:%M:%S")) if match else 0.0
    except (OSError, ValueError, OverflowError):
        return None
    if match is None:
        return None
    pid = int(match[1])
    if match[2] != platform.node() or os.name != "posix":  # Windows has no ps
        return Trainer(pid, is_local=False)
    started = started_at(pid)
    if started is None or started > since + CLOCK_SECONDS or not _is_python(pid):
        return None
    return Trainer(pid, is_local=True)


def started_at(pid: int) -> float | None:
    """Return the time at which a process started; None: it does not exist, or is a zombie."""
    proc = Path("/proc")
    if (proc / "stat").exists():
        try:
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            boot = re.search(r"(?m)^btime (\d+)", (proc / "stat").read_text())
        except OSError:
            return None
        if fields[0] == "Z" or boot is None:
            return None
        return int(boot[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    elapsed = _ps(pid, "etime")  # [[days-]hours:]minutes:seconds
    numbers = [int(part) for part in re.split(r"[-:]", elapsed)] if elapsed else []
    units = (1, 60, 3600, 86400)
    seconds = sum(n * unit for n, unit in zip(reversed(numbers), units, strict=False))
    return time.time() - seconds if numbers else None


def _is_python(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        words = _ps(pid, "command").encode()
    return b"python" in words.lower() or b"peftkit" in words


def _ps(pid: int, column: str) -> str:
    command = ["ps", "-o", f"{column}=", "-p", str(pid)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
