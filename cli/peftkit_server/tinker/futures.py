"""Pending results that clients poll, and the operation queue of each model.

An operation that arrives early waits for those before it. After `LOST_SECONDS` a missing operation
counts as lost: the operations that wait for it fail, and the model continues after them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from peftkit.errors import PeftkitError
from peftkit_server.limits import DEFAULTS, Limits
from peftkit_server.refusals import RequestError, public
from peftkit_server.store import new_id

T = TypeVar("T")
Result = bytes | dict[str, Any]
"""A message of protobuf, or JSON."""
Run = Callable[[], Result]

LOST_SECONDS = 120.0
MAX_AHEAD = 4096
"""Largest distance of an operation's number from the next one."""
MAX_RESULTS = 1 << 16
"""Most results to keep."""
RESULT_BYTES = 256
"""Bytes that a result in JSON counts as."""
MAX_REPLIES = 1 << 16
"""Most request ids remembered to answer retries with the first reply."""

_LOG = logging.getLogger(__name__)


class ReplyCache(Generic[T]):
    """Replies to earlier requests; a retry receives the first reply and has no other effect."""

    def __init__(self) -> None:
        self._replies: OrderedDict[Any, tuple[str, T]] = OrderedDict()

    def get(self, key: Any, digest: str) -> T | None:
        """Return the reply to a request; None: the request is new.

        Raises:
            RequestError: An earlier request with this key had another body.
        """
        if key not in self._replies:
            return None
        first_digest, reply = self._replies[key]
        if first_digest != digest:
            raise RequestError("an earlier request used this number.", status=409)
        return reply

    def put(self, key: Any, digest: str, reply: T) -> None:
        """Store the reply to a request."""
        self._replies[key] = digest, reply
        while len(self._replies) > MAX_REPLIES:
            self._replies.popitem(last=False)


@dataclass(eq=False, slots=True)
class PendingResult:
    """The result of a request, which its client polls.

    Attributes:
        owner: Who may retrieve it.
        future: Its result; None: the server stopped before there was one.
        check: Called whenever the client polls.
        cancel: Called if the client cancels its request.
    """

    id: str
    owner: str
    future: Future[Result | None] = field(default_factory=Future)
    check: Callable[[], None] = lambda: None
    cancel: Callable[[], None] = lambda: None

    def finish(self, result: Result | BaseException) -> None:
        """Set the result or an error, unless one is set already."""
        if self.future.done():
            return
        if isinstance(result, RequestError) and result.status == 503:
            self.future.set_result(None)
        elif isinstance(result, BaseException):
            self.future.set_result(failure(result))
        else:
            self.future.set_result(result)


def failure(error: BaseException) -> dict[str, object]:
    """Return an error in Tinker's format, with the category `user` or `server`."""
    if isinstance(error, PeftkitError):
        return {"error": public(error), "category": "user" if error.exit_code == 2 else "server"}
    _LOG.error("an operation failed", exc_info=error)
    return {"error": public(f"{type(error).__name__}: {error}"), "category": "server"}


class Futures:
    """All pending results by id, and the bytes of waiting requests, by owner.

    Ids begin with a random id of this server process; ids of earlier processes are recognized.
    """

    def __init__(self, limits: Limits = DEFAULTS) -> None:
        self._process, self._all = new_id("")[:8], dict[str, PendingResult]()
        self._limits = limits
        self._done: dict[str, OrderedDict[str, int]] = {}
        self._result_bytes, self._waiting_bytes = Counter[str](), Counter[str]()
        self._lock = threading.Lock()

    def new(self, owner: str) -> PendingResult:
        """Return a new pending result."""
        pending = PendingResult(f"{self._process}-{new_id('')}", owner)
        with self._lock:
            self._all[pending.id] = pending
        pending.future.add_done_callback(partial(self._keep, pending.id, owner))
        return pending

    def get(self, id: str, owner: str) -> PendingResult:
        """Return a pending result.

        Raises:
            RequestError: It does not exist, or has another owner. 410: a restart lost it.
        """
        pending = self._all.get(id)
        if pending is not None and pending.owner == owner:
            return pending
        if "-" in id and not id.startswith(f"{self._process}-"):
            raise RequestError("the server restarted; this result is lost.", status=410)
        raise RequestError(f"there is no request {id}.", status=404)

    def forget(self, pending: PendingResult) -> None:
        """Drop a result whose id was never returned to a client."""
        with self._lock:
            self._all.pop(pending.id, None)

    def _keep(self, id: str, owner: str, future: Future[Result | None]) -> None:
        """Count a completed result; beyond the limits, drop the oldest of the largest owner."""
        result = future.result()
        with self._lock:
            if id in self._all:
                size = len(result) if isinstance(result, bytes) else RESULT_BYTES
                self._done.setdefault(owner, OrderedDict())[id] = size
                self._result_bytes[owner] += size
            while (number := sum(map(len, self._done.values()))) > 1 and (
                number > MAX_RESULTS or self._result_bytes.total() > self._limits.result_bytes
            ):
                largest = max(self._done, key=lambda each: self._result_bytes[each])
                oldest, size = self._done[largest].popitem(last=False)
                self._result_bytes[largest] -= size
                if not self._done[largest]:
                    del self._done[largest]
                del self._all[oldest]

    def reserve(self, owner: str, size: int, *, is_next: bool) -> None:
        """Add the bytes of a waiting request.

        Args:
            is_next: Whether others may wait for it; it is accepted beyond the limit.

        Raises:
            RequestError: The waiting requests have too many bytes.
        """
        with self._lock:
            waiting = self._waiting_bytes
            for used, limit in (
                (waiting.total(), self._limits.operation_bytes),
                (waiting[owner], self._limits.share(self._limits.operation_bytes)),
            ):
                if used + size > limit and used and not is_next:
                    raise RequestError(
                        "too many requests wait.",
                        found=f"They have {used:,} bytes; the limit is operation_bytes.",
                        fix="Try again later.",
                        status=429,
                    )
            waiting[owner] += size

    def release(self, owner: str, size: int) -> None:
        """Subtract the bytes of a request that no longer waits."""
        with self._lock:
            self._waiting_bytes[owner] -= size
            self._waiting_bytes += Counter()  # drops owners without requests


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a model, and the bytes of its request."""

    pending: PendingResult
    run: Run
    size: int
    since: float = field(default_factory=time.monotonic)


class OperationQueue:
    """The operations of one model, which run in the order of their numbers, from 0.

    Args:
        call: `Worker.call` without its queue limit.
    """

    def __init__(self, call: Callable[[Run], Future[Result]], futures: Futures) -> None:
        self._call, self._futures, self._next = call, futures, 0
        self._early: dict[int, Operation] = {}
        self._ready: deque[Operation] = deque()
        self._replies: ReplyCache[str] = ReplyCache()
        self._is_busy = False
        self._closed: RequestError | None = None
        self._lock = threading.RLock()

    def submit(self, number: int, digest: str, owner: str, run: Run, size: int) -> str:
        """Queue an operation; return the id of its result. A retry returns the first id.

        Raises:
            RequestError: 409: another operation had this number; 429: too many bytes wait; 400:
                the number is too far from the next one; after `close`, its error.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if (first_id := self._replies.get(number, digest)) is not None:
                return first_id
            if not self._next - MAX_AHEAD < number < self._next + MAX_AHEAD:
                raise RequestError(
                    f"operation {number} of this model is out of order.",
                    found=f"The next operation is {self._next}.",
                )
            self._futures.reserve(owner, size, is_next=number == self._next)
            operation = Operation(self._futures.new(owner), run, size)
            operation.pending.check = self.give_up_lost
            self._replies.put(number, digest, operation.pending.id)
            if number < self._next:
                late = RequestError(f"operation {number} of this model arrived too late.")
                self._finish(operation, late)
            else:
                self._early[number] = operation
                self._advance()
            return operation.pending.id

    def _advance(self) -> None:
        while self._next in self._early:
            self._ready.append(self._early.pop(self._next))
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
        self._futures.release(operation.pending.owner, operation.size)
        operation.pending.finish(result)

    def give_up_lost(self) -> None:
        """Fail the operations that have waited `LOST_SECONDS` for a missing one."""
        with self._lock:
            times = [operation.since for operation in self._early.values()]
            if not times or time.monotonic() - min(times) < LOST_SECONDS:
                return
            error = RequestError(
                f"operation {self._next} of this model did not arrive.",
                found=f"Later operations waited {LOST_SECONDS:g} seconds for it.",
                fix="Send operations with the numbers 1, 2, 3 ... without a gap.",
            )
            self._next = max(self._early) + 1
            self._fail_early(error)

    def close(self, error: RequestError) -> None:
        """Refuse new operations and fail early ones; operations that are ready still run."""
        with self._lock:
            self._closed = error
            self._fail_early(error)

    def _fail_early(self, error: RequestError) -> None:
        early, self._early = self._early, {}
        for operation in early.values():
            self._finish(operation, error)
