"""SIGINT and SIGTERM: the first lets a run save and stop, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from peftkit.execution.environment import is_main_process, world_size

RELAY_SECONDS = 2.0
"""torchrun relays a signal that its workers, in its process group, got already: within this time
the second one does not count."""


class Interrupted(Exception):
    """A signal stopped the run; its progress is saved.

    Args:
        signum: The signal; the process should exit with `exit_code`.
        where: What was reached and saved.
    """

    def __init__(self, signum: int, where: str) -> None:
        self.signum, self.exit_code = signum, 128 + signum
        super().__init__(f"{signal.Signals(signum).name}: {where}")


class StopRequest:
    """A signal to stop, `signum`; 0 until one comes.

    Args:
        at_once: Raise on the first signal already.
        waits_for: What a stop waits for, told on stderr at the first signal; "": nothing is told.
    """

    def __init__(self, at_once: bool = False, waits_for: str = "") -> None:
        self.signum, self._at_once, self._waits_for = 0, at_once, waits_for
        self._at = 0.0

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first, raise on the second."""
        launched = world_size() > 1
        if not self.signum:
            self.signum, self._at = signum, time.monotonic()
            if not self._at_once:
                self._tell()
                return
        elif launched and time.monotonic() - self._at < RELAY_SECONDS:
            return
        # not an Exception: no handler on the way out may survive it
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)

    def _tell(self) -> None:
        if not self._waits_for or not is_main_process():
            return
        # below 80 columns: of a second line the live screen would leave nothing
        text = f"\nStopping after {self._waits_for}; once more: at once, unsaved.\n"
        with suppress(OSError):  # not print: a handler may run in the middle of one
            os.write(2, text.encode())


_here = threading.local()


def _in_this_thread() -> tuple[StopRequest, ...]:
    return getattr(_here, "requests", ())


def stop_here(signum: int = signal.SIGTERM) -> None:
    """Ask the run of this thread, which is not the main one, to save and stop, as a signal does."""
    for request in _in_this_thread():
        request.signum = request.signum or signum


@contextmanager
def stop_requests(at_once: bool = False, waits_for: str = "") -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM within the context; in other threads, `stop_here`.

    A signal that is ignored, as `nohup` and a script's `&` have it, stays ignored.
    """
    request = StopRequest(at_once, waits_for)
    if threading.current_thread() is not threading.main_thread():
        # python gives signals to the main thread, and its handlers are not ours
        outer = _in_this_thread()
        _here.requests = (request, *outer)
        try:
            yield request
        finally:
            _here.requests = outer
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, request.receive)
        yield request
    finally:
        for number, handler in before.items():
            # None: set by C code; the default is the nearest that python can set
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def stopping_at_once(where: str) -> Iterator[None]:
    """Raise Interrupted on the first signal within the context: there is nothing to save yet.

    Args:
        where: Message of the exception.
    """
    with stop_requests(at_once=True) as request:
        try:
            yield
        except BaseException:  # a library may have replaced or swallowed the exception
            if not request.signum:
                raise
    if request.signum:
        raise Interrupted(request.signum, where)
