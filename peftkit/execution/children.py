"""Processes of Python that import nothing from the working folder.

`python -m` and `python -c` search the working folder first: a file `queue.py` in a folder of runs
would replace the library's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess

SAFE_PATH = "PYTHONSAFEPATH"
"""The variable that is the flag -P; older Pythons ignore it."""


def python(*arguments: str) -> list[str]:
    """Return the command that runs this Python with `arguments`, such as -m MODULE."""
    return [sys.executable, "-P", *arguments]


@contextmanager
def _safe_path() -> Iterator[None]:
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH)
        if before is not None:
            os.environ[SAFE_PATH] = before


class _SafeProcess(SpawnProcess):
    def start(self) -> None:
        with _safe_path():
            super().start()


class _SafeContext(SpawnContext):
    Process = _SafeProcess


def spawn_context() -> SpawnContext:
    """Return the context `spawn` of multiprocessing, for processes and pools."""
    with _safe_path():
        resource_tracker.ensure_running()  # a Python, too, which the context starts when needed
    return _SafeContext()
