"""Folders that are written whole or not at all, and locks that one process holds at a time."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from peftkit.files import disk


@contextmanager
def new_folder(
    out: Path, *, last: str = "", replaced: Callable[[str], bool] = lambda name: True
) -> Iterator[Path]:
    """Yield an empty folder whose files become those of `out`, durably, when the block ends well.

    Where it does not end well, `out` is as it was. A folder that is there already is written in,
    since it may be a disk of its own; then the files are moved up.

    Args:
        last: The file without which `out` is not used: it is removed first and moved last, so that
            a folder that is half replaced is never taken for a whole one.
        replaced: Tells of the name of a file in `out` whether it goes where there is no new one.

    Raises:
        OutputError: The folder cannot be written into.
    """
    home = disk.writable_folder(out if out.exists() else out.parent)
    folder = home / f".{out.name}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
        for path in folder.rglob("*"):  # those that libraries wrote are not on the disk yet
            if path.is_file():
                disk.fsync_file(path)
        if home == out or out.exists():
            _move_into(folder, out, last, replaced)
        else:
            os.replace(folder, out)
        disk.fsync_dir(home)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move_into(folder: Path, out: Path, last: str, replaced: Callable[[str], bool]) -> None:
    if last:
        (out / last).unlink(missing_ok=True)
    for path in out.iterdir():
        if path.is_file() and replaced(path.name) and not (folder / path.name).exists():
            path.unlink()
    for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
        if path.is_dir():
            shutil.rmtree(out / path.name, ignore_errors=True)
        os.replace(path, out / path.name)
    disk.fsync_dir(out)


LOCKS = ".locks"
"""A folder of lock files, beside what they are about; not every system can remove them."""


@contextmanager
def alone(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of a file or folder as long as the context lasts; wait while another does.

    The lock of a process that is killed is gone with it. Where the file system knows no locks,
    nobody waits.

    Args:
        path: In a folder that is there; it need not be there itself.
        on_wait: Called before waiting; what it raises ends the wait.
    """
    from filelock import FileLock, Timeout  # brought by datasets

    (path.parent / LOCKS).mkdir(exist_ok=True)
    lock = FileLock(path.parent / LOCKS / path.name)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock.acquire(timeout=0))
        except Timeout:
            on_wait()
            held.enter_context(lock.acquire(poll_interval=0.2))
        except NotImplementedError:
            pass
        yield
