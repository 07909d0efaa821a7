"""A stream for messages whose failure must not stop a run."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO, Any


class Unfailing:
    """A stream that ignores that its reader has closed or its disk is full.

    A closed terminal or a full log loses messages, not the run.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write; after a failure, discard."""
        try:
            return self._stream.write(text)
        except OSError:
            self._abandon()
            return len(text)

    def flush(self) -> None:
        """Flush; after a failure, discard."""
        try:
            self._stream.flush()
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stream.flush()
