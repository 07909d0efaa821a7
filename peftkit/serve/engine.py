"""A queue of prompts and one thread that answers those that wait together, in batches."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from peftkit.errors import RunError
from peftkit.inference.bank import AdapterBank
from peftkit.inference.generate import room_left
from peftkit.inference.rows import Row, Whole, run_rows
from peftkit.serve.requests import RequestError

_LOG = logging.getLogger(__name__)
Told = str | Whole | Exception


@dataclass(eq=False, slots=True)
class Job:
    """One prompt to be answered.

    Args:
        adapter: Its adapter; None is the bare base.
        ids: Tokens of the prompt.
        stops: Tokens that end the answer.
        stop_texts: Texts that end it.
        tell: Takes the pieces of the answer, then the whole or what went wrong; called by the
            engine's thread.
    """

    adapter: str | None
    ids: Sequence[int]
    stops: tuple[int, ...]
    stop_texts: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    tell: Callable[[Told], None]
    cancelled: threading.Event = field(default_factory=threading.Event)

    def kind(self) -> Hashable:
        """Jobs of one kind can share a batch; what is sampled with a seed runs alone."""
        if self.temperature == 0:
            return self.stops
        alone = None if self.seed is None else id(self)
        return (self.stops, self.temperature, self.top_p, alone)


class Engine:
    """Answers jobs in batches, first come first served.

    Args:
        max_batch: Prompts in one batch.
        max_waiting: Prompts that may wait; more are refused.
        gather: Seconds to wait for others when one comes to an idle engine.
    """

    def __init__(
        self,
        bank: AdapterBank,
        *,
        max_batch: int = 8,
        max_waiting: int = 64,
        gather: float = 0.01,
    ) -> None:
        self.bank = bank
        self.max_batch, self.max_waiting = max_batch, max_waiting
        self.counts: Counter[str] = Counter()
        self.num_running = 0
        self._gather = gather
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="peftkit-serve", daemon=True)

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer nothing more: running answers stop at the next token, waiting ones are told."""
        with self._changed:
            self._ended = True
            left, self._waiting = self._waiting, []
            self._changed.notify_all()
        for job in left:
            job.tell(_shutting_down())
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether jobs are answered."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Number of prompts that wait."""
        return len(self._waiting)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let jobs be answered; all of them or none.

        Raises:
            RequestError: Too many wait already, or the engine has stopped.
        """
        with self._changed:
            if self._ended:
                raise _shutting_down()
            if len(self._waiting) + len(jobs) > self.max_waiting:
                raise RequestError(
                    "too many requests wait.",
                    found=f"{len(self._waiting)} prompts wait, of {self.max_waiting} that may.",
                    fix="Try again later.",
                    status=429,
                    code="queue_full",
                )
            self._waiting += jobs
            self._changed.notify_all()

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:
                self._answer(batch)

    def _next_batch(self) -> list[Job] | None:
        """Wait for jobs and return those that can run together; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            self._changed.wait_for(
                lambda: len(self._waiting) >= self.max_batch or self._ended, self._gather
            )
            if self._ended:
                return None
            self._waiting = [job for job in self._waiting if not job.cancelled.is_set()]
            batch: list[Job] = []
            for job in self._waiting:
                if len(batch) < self.max_batch and self._fits(batch, job):
                    batch.append(job)
            self._waiting = [job for job in self._waiting if job not in batch]
            self.num_running = len(batch)
            return batch

    def _fits(self, batch: Sequence[Job], job: Job) -> bool:
        """Tell whether a job can join a batch without its answers being cut for it."""
        if not batch:
            return True
        if job.kind() != batch[0].kind():
            return False
        longest = max((*batch, job), key=lambda one: len(one.ids))
        most = max(one.max_new_tokens for one in (*batch, job))
        return room_left(self.bank.base.model, [longest.ids], most) == most

    def _answer(self, jobs: Sequence[Job]) -> None:
        told: set[int] = set()
        self.counts["batches"] += 1
        self.counts["rows"] += len(jobs)
        self.counts["prompt_tokens"] += sum(len(job.ids) for job in jobs)

        def row(index: int, job: Job) -> Row:
            def tell(what: str | Whole) -> None:
                if isinstance(what, Whole):
                    told.add(index)
                    self.counts["generated_tokens"] += what.num_tokens
                job.tell(what)

            return Row(
                job.ids,
                job.max_new_tokens,
                stop_texts=job.stop_texts,
                tell=tell,
                is_cancelled=lambda: self._ended or job.cancelled.is_set(),
            )

        rows = [row(index, job) for index, job in enumerate(jobs)]
        first = jobs[0]
        error: Exception = _shutting_down()
        try:
            with self.bank.use([job.adapter for job in jobs]):
                run_rows(
                    self.bank.base.model,
                    self.bank.base.tokenizer,
                    rows,
                    stops=first.stops,
                    temperature=first.temperature,
                    top_p=first.top_p,
                    seed=first.seed,
                )
        except Exception as problem:  # the thread goes on: the next batch may well succeed
            _LOG.exception("a batch of %d failed", len(jobs))
            error = RunError(f"the model failed: {type(problem).__name__}: {problem}")
        for index, job in enumerate(jobs):
            if index not in told:
                self.counts["generated_tokens"] += rows[index].num_new
                job.tell(error)
        self.num_running = 0


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down.", status=503, code="shutting_down")
