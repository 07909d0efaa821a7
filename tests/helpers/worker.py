"""Jobs of the server's worker, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from peftkit.inference.bank import AdapterBank
from peftkit.inference.engine import Limits, Request
from peftkit.inference.sampling import Sampling
from peftkit.serve.worker import Job, Piece, Worker


class Submitted:
    """A job, and what it is told."""

    def __init__(self, adapter: str | None, ids: list[int], seed: int = 0, **settings: Any) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        sampling = Sampling(**{"max_new_tokens": 4, **settings})
        self.job = Job(Request(ids, sampling, seed, adapter), self.queue.put)

    def end(self) -> Any:
        """Return the whole answer, or the error."""
        text = ""
        while isinstance(what := self.queue.get(timeout=20), Piece):
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
    """Answer jobs that all wait already."""
    worker = Worker(bank, limits=Limits(**limits), ready=ready)
    worker.submit([one.job for one in requests])
    worker.start()
    try:
        return [one.end() for one in requests], worker
    finally:
        worker.stop()
