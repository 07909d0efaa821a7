"""SIGINT and SIGTERM: the first saves and stops a run, the second stops it immediately."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from peftkit.events import Notice, event_line, logs_json
from peftkit.execution.environment import is_main_process, world_size

RELAY_SECONDS = 2.0
"""Time after the first signal in which a second one is ignored: torchrun relays a signal that its
workers, in the same process group, have already received."""

# Shorter than 80 columns: the live screen would overwrite a second line.
STOPPING = "Saving a checkpoint after this step, then stopping. Again: stop now, unsaved."
SAVING = "Saving the adapter, then stopping. Again: stop now, unsaved."


class Interrupted(Exception):
    """A signal stopped the run, after its progress was saved.

    Args:
        signum: The signal; the process should exit with `exit_code`.
        where: The saved progress, for the message.
    """

    def __init__(self, signum: int, where: str) -> None:
        self.signum, self.exit_code = signum, 128 + signum
        super().__init__(f"{signal.Signals(signum).name}: {where}")


class StopRequest:
    """The signal that was received, `signum`; 0 before.

    Args:
        immediately: Raise on the first signal already.
        message: Text for stderr at the first signal, if any.
    """

    def __init__(self, immediately: bool = False, message: str = "") -> None:
        self.signum, self.is_immediate, self._message = 0, immediately, message
        self._received = 0.0

    @property
    def _line(self) -> str:
        return event_line(Notice(self._message)) if logs_json() else f"\n{self._message}\n"

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first, raise on the second."""
        if not self.signum:
            self.signum, self._received = signum, time.monotonic()
            if not self.is_immediate:
                if self._message and is_main_process():
                    # not print: the handler may interrupt one
                    with suppress(OSError):
                        os.write(2, self._line.encode())
                return
        elif world_size() > 1 and time.monotonic() - self._received < RELAY_SECONDS:
            return
        # not an Exception: no `except Exception` on the way out may catch it
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


_thread = threading.local()


def stop_here(signum: int = signal.SIGTERM) -> None:
    """Stop the run of this thread (not the main thread) as a signal does: after saving, if any.

    Raises:
        SystemExit: Nothing needs saving yet; `stopping_immediately` catches it.
    """
    requests: tuple[StopRequest, ...] = getattr(_thread, "requests", ())
    for request in requests:
        request.signum = request.signum or signum
    if requests and requests[0].is_immediate:
        raise SystemExit(128 + signum)


def pause_point() -> None:
    """Call the function of `pause_points`, if nothing needs saving yet; between rows, say."""
    act, pid = getattr(_thread, "pause", (None, 0))
    requests: tuple[StopRequest, ...] = getattr(_thread, "requests", ())
    if act is not None and requests and requests[0].is_immediate and pid == os.getpid():
        act()


@contextmanager
def pause_points(act: Callable[[], None]) -> Iterator[None]:
    """Within the context, `pause_point` calls a function in this thread, not in forks of it."""
    _thread.pause = act, os.getpid()
    try:
        yield
    finally:
        del _thread.pause


@contextmanager
def stop_requests(immediately: bool = False, message: str = "") -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM within the context; in other threads, `stop_here`.

    An ignored signal (`nohup`, a script's `&`) stays ignored.
    """
    request = StopRequest(immediately, message)
    if threading.current_thread() is not threading.main_thread():
        # python delivers signals to the main thread only, whose handlers belong to the application
        outer = getattr(_thread, "requests", ())
        _thread.requests = (request, *outer)
        try:
            yield request
        finally:
            _thread.requests = outer
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, request.receive)
        yield request
    finally:
        for number, handler in before.items():
            # None means that C code has set the handler, which python cannot restore
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def stopping_immediately(where: str) -> Iterator[None]:
    """Raise Interrupted on the first signal within the context, where nothing needs saving yet.

    Args:
        where: Message of the exception.
    """
    with stop_requests(immediately=True) as request:
        try:
            yield
        except BaseException:  # a library may have replaced or swallowed the exception
            if not request.signum:
                raise
    if request.signum:
        raise Interrupted(request.signum, where)
