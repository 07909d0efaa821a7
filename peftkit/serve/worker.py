"""The thread that makes all answers; requests join and leave the engine's batch at any token."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from peftkit.errors import PeftkitError, RunError
from peftkit.inference.bank import AdapterBank
from peftkit.inference.call_formats import Call
from peftkit.inference.calls import Said
from peftkit.inference.engine import AnswerTooLarge, Completion, Engine, Limits, Request
from peftkit.inference.generate import TextStream
from peftkit.inference.sampling import Chosen
from peftkit.serve.answer_calls import AnswerCalls
from peftkit.serve.requests import RequestError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer.

    Attributes:
        chosen: Its tokens with their log-probabilities, if requested.
        reason: Why the answer ended, in the last piece. stop: an end token or a stop text; length:
            its maximum, or the model's context.
        thought, calls: Reasoning and calls, where the answer is read for them.
        num_tokens: Tokens of the whole answer with its end token, in the last piece.
    """

    text: str
    chosen: tuple[Chosen, ...] = ()
    reason: Literal["stop", "length"] | None = None
    num_tokens: int = 0
    thought: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(eq=False, slots=True)
class Job:
    """One answer to a client.

    Args:
        send: Receives the pieces of the answer, or an error; the worker's thread calls it.
        stop_texts: Texts that end it.
        calls: Reads it for calls of tools; None: it is text.
        keeps_end: Whether the end token belongs to the tokens that are reported.
    """

    request: Request
    send: Callable[[Piece | Exception], None]
    stop_texts: tuple[str, ...] = ()
    calls: AnswerCalls | None = None
    keeps_end: bool = False
    completion: Completion | None = None
    is_cancelled: bool = False
    is_done: bool = False

    def cancel(self) -> None:
        """Stop the answer at the next token."""
        self.is_cancelled = True
        if self.completion is not None:
            self.completion.finish()


class Worker:
    """Makes the answers of jobs in a thread of its own.

    Args:
        limits: Of the engine.
        max_waiting: Queue limit; beyond it, requests are refused.
    """

    def __init__(
        self, bank: AdapterBank, *, limits: Limits | None = None, max_waiting: int = 64
    ) -> None:
        self.bank, self.limits, self.max_waiting = bank, limits or Limits(), max_waiting
        self._new: list[Job] = []
        self._jobs: list[Job] = []
        self._engine: Engine | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="peftkit-serve", daemon=True)

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop all answers at the next token; waiting and running jobs get an error."""
        with self._changed:
            self._ended = True
            for job in self._jobs:
                if job.completion is not None:
                    job.completion.finish()
            self._changed.notify_all()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Number of prompts that wait."""
        return len(self._new) + (self._engine.num_waiting if self._engine else 0)

    @property
    def num_running(self) -> int:
        """Number of prompts that are being answered."""
        return max(0, len(self._jobs) + len(self._new) - self.num_waiting)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; all of them or none.

        Raises:
            RequestError: Too many wait already, or the worker has stopped.
        """
        with self._changed:
            if self._ended:
                raise _shutting_down()
            if self.num_waiting + len(jobs) > self.max_waiting:
                raise RequestError(
                    "too many requests wait.",
                    found=f"{self.num_waiting} prompts wait, of {self.max_waiting} that may.",
                    fix="Try again later.",
                    status=429,
                    code="queue_full",
                )
            self._new += jobs
            self._changed.notify_all()

    def _work(self) -> None:
        while self._wait_for_jobs():
            try:
                with self.bank.engine(self.limits) as self._engine:
                    while self._wait(self._engine):
                        self._step(self._engine)
                        self._jobs = [job for job in self._jobs if self._ended or _is_running(job)]
            except Exception as problem:  # later jobs may well succeed
                _LOG.exception("%d answers failed", len(self._jobs))
                error = RunError(f"the model failed: {type(problem).__name__}: {problem}")
                self._fail_all(error)
        self._fail_all(_shutting_down())

    def _step(self, engine: Engine) -> None:
        try:
            engine.step()
        except AnswerTooLarge as error:  # the others go on
            for job in self._jobs:
                if job.completion is error.completion and not job.is_done:
                    job.send(error)

    def _wait_for_jobs(self) -> bool:
        """Wait for jobs without an engine, which would change the model; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._ended)
            return not self._ended

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            left, self._jobs = self._jobs, []
            if self._ended:
                left, self._new = [*left, *self._new], []
        for job in left:
            if not job.is_done:
                job.send(error)

    def _wait(self, engine: Engine) -> bool:
        """Wait for work, and submit new jobs to the engine; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._ended or not engine.is_idle)
            new, self._new = [job for job in self._new if not job.is_cancelled], []
            self._jobs += new
        for job in new:
            self._begin(engine, job)
        return not self._ended

    def _begin(self, engine: Engine, job: Job) -> None:
        request = replace(job.request, on_token=self._sender(job))
        try:
            job.completion = engine.submit(request)
        except PeftkitError as error:
            job.send(error)
            job.is_cancelled = True
        if job.is_cancelled:
            job.cancel()

    def _sender(self, job: Job) -> Callable[[Completion], None]:
        """Return the callback that sends each new piece of a job's answer."""
        reads = job.calls
        text, num_sent = (
            TextStream(self.bank.base.tokenizer, job.stop_texts, special=reads is not None),
            0,
        )

        def send(completion: Completion) -> None:
            nonlocal num_sent
            if job.is_done:
                return
            said = Said(text.take(completion))
            number = len(completion.chosen if job.keeps_end else completion.ids)
            if reads is not None:
                said = reads.take(said.text, completion)
            chosen = tuple(completion.chosen[num_sent:number]) if job.request.log_probs else ()
            num_sent += len(chosen)
            if completion.ended_by in ("stop", "length"):
                job.is_done = True
                reason = "stop" if text.is_stopped else completion.ended_by
                job.send(Piece(said.text, chosen, reason, len(completion.chosen), *said[1:]))
            elif said != Said() or chosen:
                job.send(Piece(said.text, chosen, None, 0, *said[1:]))

        return send


def _is_running(job: Job) -> bool:
    return job.completion is not None and job.completion.ended_by is None


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down.", status=503, code="shutting_down")
