"""Requests to the server's worker, and their completions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from peftkit.inference.bank import AdapterBank
from peftkit.inference.engine import Limits, Request
from peftkit.inference.sampling import Sampling
from peftkit_server.generation import Collected, Generation
from peftkit_server.worker import Worker


class Submitted:
    """A generation, and its completion."""

    def __init__(self, adapter: str | None, ids: list[int], seed: int = 0, **settings: Any) -> None:
        self.answers = Collected(1)
        sampling = Sampling(**{"max_new_tokens": 4, **settings})
        self.job = Generation(Request(ids, sampling, seed, adapter), partial(self.answers.take, 0))

    def end(self) -> Any:
        """Return the whole completion, or the error."""
        return self.answers.exception(timeout=20) or self.answers.result()[0]


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
