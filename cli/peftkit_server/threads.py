"""Threads that never keep the process from ending, and serve the owners of their work in turn."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from peftkit_server.refusals import RequestError
from peftkit_server.schedule import Call, Schedule, Share, check_room, check_share, whole

T = TypeVar("T")


class DaemonThreads:
    """Daemon threads for calls of several owners; Python joins the threads of `ThreadPoolExecutor`.

    Args:
        number: Number of threads.
        share: Returns the part of the threads and of `max_calls` that one owner may use.
        max_calls: Most calls that wait or run; None: no limit.
        kind: Name of the calls, for errors.
        code: Error code of the limit `max_calls`.
    """

    def __init__(
        self,
        number: int,
        name: str,
        share: Share = whole,
        *,
        max_calls: int | None = None,
        kind: str = "requests",
        code: str = "queue_full",
    ) -> None:
        self._share, self._max_calls, self._kind, self._code = share, max_calls, kind, code
        self._most_running = share(number)  # of one owner
        self._schedule: Schedule[Call] = Schedule()
        self._held, self._running = Counter[str](), Counter[str]()  # by owner
        self._changed, self._ended = threading.Condition(), False
        for _ in range(number):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Hold one of `max_calls` places for an owner; a call in the context needs no other.

        Raises:
            RequestError: 429: no place is free.
        """
        with self._changed:
            if (most := self._max_calls) is not None:
                check_room(self._held.total(), 1, most, self._kind, self._code)
                check_share(self._held[owner], 1, self._share(most), self._kind)
            self._held[owner] += 1
        try:
            yield
        finally:
            with self._changed:
                self._held[owner] -= 1
                self._held += Counter()  # drops owners without calls

    def submit(self, function: Callable[[], T], owner: str = "") -> Future[T]:
        """Queue a call, without a place."""
        call = Call(owner, function, Future[Any]())
        with self._changed:
            self._schedule.put(call)
            self._changed.notify()
        return call.future

    async def result(self, function: Callable[[], T], owner: str) -> T:
        """Return the result of a call without a place, even if the client disconnects."""
        return await asyncio.wrap_future(self.submit(function, owner))

    async def call(self, function: Callable[[], T], request: Request) -> T:
        """Return the result of a function for a request whose body has been read.

        Raises:
            RequestError: 429: no place is free; 499: the client disconnected.
        """
        with self.place(request.state.owner):
            return await self.run(function, request)

    async def run(self, function: Callable[[], T], request: Request) -> T:
        """Return the result of `call` in a `place`."""
        future = self.submit(function, request.state.owner)
        try:
            return await awaited(future, request)
        finally:
            if future.cancel():  # it waited: it never runs
                with self._changed:
                    self._schedule.drop(lambda call: call.future is future)

    def shutdown(self) -> None:
        """Cancel the calls that wait, and end idle threads; running calls are abandoned."""
        with self._changed:
            self._ended = True
            for call in self._schedule:
                call.future.cancel()
            self._changed.notify_all()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call.run()()
            with self._changed:
                self._running[call.owner] -= 1
                self._running += Counter()
                self._changed.notify()  # another call of this owner may fit now
            del call  # do not hold the last result while idle

    def _next(self) -> Call | None:
        """Wait for the next call; None: after `shutdown`."""
        with self._changed:
            call: Call | None = None
            while not self._ended and (call := self._schedule.take(self._fits)) is None:
                self._changed.wait()
            if call is not None:
                self._running[call.owner] += 1
            return call

    def _fits(self, call: Call) -> bool:
        return self._running[call.owner] < self._most_running


async def awaited(future: Future[T], request: Request) -> T:
    """Return the result of a future for a request whose body has been read.

    Raises:
        RequestError: 499: the client disconnected.
    """
    result, gone = asyncio.wrap_future(future), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise RequestError("the client disconnected.", status=499)
        return result.result()
    finally:
        gone.cancel()
        result.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
