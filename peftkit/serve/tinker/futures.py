"""Results that clients come back for, and the order of the operations of a model.

An operation that comes before its turn waits for those before it. One that never comes is given up
after `LOST_SECONDS`: those that wait for it fail, and the model goes on after them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from peftkit.errors import PeftkitError
from peftkit.serve.requests import RequestError
from peftkit.serve.store import new_id

T = TypeVar("T")
Result = bytes | dict[str, Any]
"""A message of protobuf, or JSON."""
Run = Callable[[], Result]

LOST_SECONDS = 120.0
MAX_AHEAD = 4096
"""How far ahead of its turn an operation may come."""
MAX_WAITING_BYTES = 1 << 29
"""Of the requests that wait."""
MAX_RESULTS, MAX_RESULT_BYTES = 1 << 16, 1 << 28
"""Results that are kept; the oldest go."""
MAX_REPLIES = 1 << 16
"""Requests whose repeats are known."""

_LOG = logging.getLogger(__name__)


class ReplyCache(Generic[T]):
    """The replies to earlier requests: one that is sent again does nothing."""

    def __init__(self) -> None:
        self._replies: OrderedDict[Any, tuple[str, T]] = OrderedDict()

    def reply(self, key: Any, digest: str) -> T | None:
        """Return the reply to a request, if it was sent before.

        Raises:
            RequestError: Another request had its key.
        """
        if key not in self._replies:
            return None
        known, reply = self._replies[key]
        if known != digest:
            raise RequestError("another request with this number was sent before.", status=409)
        return reply

    def keep(self, key: Any, digest: str, reply: T) -> None:
        """Keep the reply to a request."""
        self._replies[key] = digest, reply
        while len(self._replies) > MAX_REPLIES:
            self._replies.popitem(last=False)


@dataclass(eq=False, slots=True)
class PendingResult:
    """A result to come.

    Attributes:
        owner: Who may have it.
        future: None is its result where the server ends before there is one.
        check: Called when somebody asks for it.
        cancel: Called when nobody wants it any more.
    """

    id: str
    owner: str
    future: Future[Result | None] = field(default_factory=Future)
    check: Callable[[], None] = lambda: None
    cancel: Callable[[], None] = lambda: None

    def finish(self, result: Result | BaseException) -> None:
        """Set the result, or an error, unless there is one."""
        if self.future.done():
            return
        if isinstance(result, RequestError) and result.status == 503:
            self.future.set_result(None)
        else:
            is_error = isinstance(result, BaseException)
            self.future.set_result(failure(result) if is_error else result)  # type: ignore[arg-type]

    def finish_with(self, done: Future[Any]) -> None:
        """Set what an operation of the worker has come to."""
        self.finish(done.exception() or done.result())


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as Tinker's clients read it; its category says whose fault it is."""
    if isinstance(error, PeftkitError):
        return {"error": str(error), "category": "user" if error.exit_code == 2 else "server"}
    _LOG.error("an operation failed", exc_info=error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}


class Futures:
    """All results, by id, and the bytes of the requests that wait.

    An id begins with the name of this start of the server, so that those of earlier ones are known.
    """

    def __init__(self) -> None:
        self._run, self._all = new_id("")[:8], dict[str, PendingResult]()
        self._done: OrderedDict[str, int] = OrderedDict()
        self._kept = self._waiting = 0
        self._lock = threading.Lock()

    def new(self, owner: str) -> PendingResult:
        """Return a result to come."""
        pending = PendingResult(f"{self._run}-{new_id('')}", owner)
        with self._lock:
            self._all[pending.id] = pending
        pending.future.add_done_callback(partial(self._keep, pending.id))
        return pending

    def get(self, id: str, owner: str) -> PendingResult:
        """Return a result to come.

        Raises:
            RequestError: There is none, or it is another owner's; 410: it was lost in a restart.
        """
        pending = self._all.get(id)
        if pending is not None and pending.owner == owner:
            return pending
        if "-" in id and not id.startswith(f"{self._run}-"):
            raise RequestError("the server was restarted; this result is lost.", status=410)
        raise RequestError(f"there is no request {id} here.", status=404)

    def forget(self, pending: PendingResult) -> None:
        """Drop a result that nobody was told of."""
        with self._lock:
            self._all.pop(pending.id, None)

    def _keep(self, id: str, future: Future[Result | None]) -> None:
        result = future.result()
        with self._lock:
            if id in self._all:
                self._done[id] = size = len(result) if isinstance(result, bytes) else 256
                self._kept += size
            while len(self._done) > 1 and (
                len(self._done) > MAX_RESULTS or self._kept > MAX_RESULT_BYTES
            ):
                oldest, size = self._done.popitem(last=False)
                self._kept -= size
                del self._all[oldest]

    def wait(self, size: int, *, is_next: bool) -> None:
        """Count the bytes of a request that waits.

        Args:
            is_next: Others may wait for it: it is let in anyway.

        Raises:
            RequestError: Too much waits.
        """
        with self._lock:
            if self._waiting + size > MAX_WAITING_BYTES and self._waiting and not is_next:
                raise RequestError(
                    "too many requests wait.",
                    found=f"{self._waiting:,} bytes of them.",
                    fix="Try again later.",
                    status=429,
                )
            self._waiting += size

    def waited(self, size: int) -> None:
        """Count a request that waits no more."""
        with self._lock:
            self._waiting -= size


@dataclass(frozen=True, slots=True)
class Operation:
    """One of a model's operations, and the bytes of its request."""

    pending: PendingResult
    run: Run
    size: int
    since: float = field(default_factory=time.monotonic)


class OperationQueue:
    """The operations of one model, one after the other; the first has the number 0.

    Args:
        call: `Worker.call`; it refuses nothing for the number of those that wait.
    """

    def __init__(self, call: Callable[[Run], Future[Result]], futures: Futures) -> None:
        self._call, self._futures, self._next = call, futures, 0
        self._held: dict[int, Operation] = {}
        self._ready: deque[Operation] = deque()
        self._known: ReplyCache[str] = ReplyCache()
        self._is_busy = False
        self._closed: RequestError | None = None
        self._lock = threading.RLock()

    def submit(self, number: int, digest: str, owner: str, run: Run, size: int) -> str:
        """Take an operation; return the id of its result: the earlier one's, if it is repeated.

        Raises:
            RequestError: 409: another operation had this number; 429: too much waits; 400: the
                number is far from its turn; that of `close`.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if (known := self._known.reply(number, digest)) is not None:
                return known
            if not self._next - MAX_AHEAD < number < self._next + MAX_AHEAD:
                raise RequestError(
                    f"operation {number} of this model is out of order.",
                    found=f"The next one is {self._next}.",
                )
            self._futures.wait(size, is_next=number == self._next)
            operation = Operation(self._futures.new(owner), run, size)
            operation.pending.check = self.give_up_lost
            self._known.keep(number, digest, operation.pending.id)
            if number < self._next:
                late = RequestError(f"operation {number} of this model came too late.")
                self._finish(operation, late)
            else:
                self._held[number] = operation
                self._advance()
            return operation.pending.id

    def _advance(self) -> None:
        while self._next in self._held:
            self._ready.append(self._held.pop(self._next))
            self._next += 1
        while self._ready and not self._is_busy:
            operation, self._is_busy = self._ready.popleft(), True
            try:
                future = self._call(operation.run)
            except RequestError as error:  # the server is stopping
                self._is_busy = False
                self._finish(operation, error)
            else:
                future.add_done_callback(partial(self._done, operation))

    def _done(self, operation: Operation, future: Future[Result]) -> None:
        with self._lock:
            self._is_busy = False
            self._finish(operation, future.exception() or future.result())
            self._advance()

    def _finish(self, operation: Operation, result: Result | BaseException) -> None:
        self._futures.waited(operation.size)
        operation.pending.finish(result)

    def give_up_lost(self) -> None:
        """Fail what has waited too long for an operation that did not come."""
        with self._lock:
            waits = [operation.since for operation in self._held.values()]
            if not waits or time.monotonic() - min(waits) < LOST_SECONDS:
                return
            error = RequestError(
                f"operation {self._next} of this model did not come.",
                found=f"Those after it waited {LOST_SECONDS:g} seconds, in vain.",
                fix="Send operations with the numbers 1, 2, 3 ... without a gap.",
            )
            self._next = max(self._held) + 1
            self._fail_held(error)

    def close(self, error: RequestError) -> None:
        """Take no more operations, and fail those that wait for others; those in turn go on."""
        with self._lock:
            self._closed = error
            self._fail_held(error)

    def _fail_held(self, error: RequestError) -> None:
        held, self._held = self._held, {}
        for operation in held.values():
            self._finish(operation, error)
