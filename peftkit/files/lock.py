"""One process at a time: a lock file, which the system lets go of when its holder ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def only_one(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file as long as the context lasts; wait while another process holds it.

    Where the system or the file system knows no such locks, nobody waits.

    Args:
        on_wait: Called before waiting.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
