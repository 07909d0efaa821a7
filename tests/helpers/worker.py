"""Requests to the server's worker, and their completions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from peftkit.inference.bank import AdapterBank
from peftkit.inference.engine import Limits, Request
from peftkit.inference.sampling import Sampling
from peftkit_server.generation import Generation, Output
from peftkit_server.worker import Worker


class Submitted:
    """A generation, and its outputs."""

    def __init__(self, adapter: str | None, ids: list[int], seed: int = 0, **settings: Any) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        sampling = Sampling(**{"max_new_tokens": 4, **settings})
        self.job = Generation(Request(ids, sampling, seed, adapter), self.queue.put)

    def end(self) -> Any:
        """Return the whole completion, or the error."""
        text = ""
        while isinstance(what := self.queue.get(timeout=20), Output):
            text += what.text
            if what.reason is not None:
                return replace(what, text=text)
        return what


def run_jobs(
    bank: AdapterBank,
    requests: list[Submitted],
    ready: Callable[[str | None], None] = lambda adapter: None,
    **limits: Any,
) -> tuple[list[Any], Worker]:
    """Run generations that all wait when the worker starts."""
    worker = Worker(bank, limits=Limits(**limits), ready=ready)
    worker.submit([one.job for one in requests])
    with running(worker):
        return [one.end() for one in requests], worker


@contextmanager
def running(worker: Worker) -> Iterator[None]:
    """Run a worker within the context."""
    worker.start()
    try:
        yield
    finally:
        worker.stop()
