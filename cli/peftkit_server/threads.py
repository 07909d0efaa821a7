"""Threads that never keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Executor of daemon threads; Python joins those of `ThreadPoolExecutor` at its exit."""

    def __init__(self, number: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._number = number
        for _ in range(number):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, lambda: fn(*args, **named)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel the calls that wait, and end idle threads; running calls are abandoned."""
        while not self._calls.empty():
            if (call := self._calls.get()) is not None:
                call[0].cancel()
        for _ in range(self._number):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, run = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(run())
            except BaseException as problem:
                future.set_exception(problem)
            del call, future, run  # do not hold the last result while idle


async def in_own_thread(work: Callable[[], T]) -> T:
    """Return the result of a function in a new thread, even if asyncio's threads are busy."""
    threads = DaemonThreads(1, "peftkit-stop")
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work)
    finally:
        threads.shutdown()
