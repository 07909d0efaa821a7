"""SIGINT and SIGTERM: the first one asks a run to save and stop, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# torchrun passes on a signal that its workers, being in its process group, got already.
RELAY_SECONDS = 2.0


class Interrupted(Exception):
    """A run was asked to stop, and did, with a checkpoint.

    Args:
        signum: The signal that asked; the process should exit with `exit_code`.
        where: What was reached and saved.
    """

    def __init__(self, signum: int, where: str) -> None:
        self.signum, self.exit_code = signum, 128 + signum
        super().__init__(f"{signal.Signals(signum).name}: {where}")


class StopRequest:
    """Whether somebody asked to stop; `signum` is 0 until then."""

    def __init__(self) -> None:
        self.signum = 0
        self._at = 0.0

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Take a signal: note the first, raise on the second."""
        if not self.signum:
            self.signum, self._at = signum, time.monotonic()
            return
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if launched and time.monotonic() - self._at < RELAY_SECONDS:
            return
        # No Exception: nothing on the way out may take it for an error that can be survived.
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take SIGINT and SIGTERM for as long as the block runs; in the main thread only."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # python gives signals to the main thread, and its handlers are not ours
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, request.receive)
        yield request
    finally:
        for number, handler in before.items():
            # None: set by C code; the default is the nearest that python can set
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
