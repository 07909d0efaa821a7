"""A stream for remarks, whose loss costs nothing but the remarks."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO, Any


class Unfailing:
    """A stream that goes on as if nothing were the matter when its reader or its disk gives up.

    A closed terminal or a full log costs what would have been said, not the run.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or write to nowhere from now on."""
        try:
            return self._stream.write(text)
        except OSError:
            self._abandon()
            return len(text)

    def flush(self) -> None:
        """Flush, or write to nowhere from now on."""
        try:
            self._stream.flush()
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stream.flush()
