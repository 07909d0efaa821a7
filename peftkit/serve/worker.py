"""The thread that has the model: answers, whose requests join and leave the engine's batch at any
token, and between them whatever else needs the model."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from peftkit.errors import PeftkitError, RunError
from peftkit.execution import rng
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.signals import stop_here
from peftkit.forward.attention import original_attention
from peftkit.inference.bank import AdapterBank
from peftkit.inference.call_formats import Call
from peftkit.inference.calls import Said
from peftkit.inference.engine import AnswerTooLarge, Completion, Engine, Limits, Request, room_left
from peftkit.inference.generate import TextStream
from peftkit.inference.sampling import Chosen
from peftkit.model.lift import eager, lifted
from peftkit.model.modes import evaluating
from peftkit.serve.answer_calls import AnswerCalls
from peftkit.serve.requests import RequestError

T = TypeVar("T")
Operation = tuple[Callable[[], Callable[[], None]], Future[Any]]
Work = Callable[[Callable[[], None]], None]
"""Something long in steps, which calls its argument between them."""

STEPS_OF_A_TURN = 16
"""Tokens of each answer, at least, before something else that waits has its turn."""
MAX_OPERATIONS = 4096
"""Operations that may wait."""

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
    """The thread that has the model: it makes answers, and runs operations and works between them.

    The engine's batch stays while an operation or a step of a work runs; then the answers go on.

    Args:
        limits: Of the engine.
        max_waiting: Queue limit of prompts; beyond it, requests are refused.
        ready: Called in the thread with the adapter of each job before it begins.
    """

    def __init__(
        self,
        bank: AdapterBank,
        *,
        limits: Limits | None = None,
        max_waiting: int = 64,
        ready: Callable[[str | None], None] = lambda adapter: None,
    ) -> None:
        self.bank, self.limits, self.max_waiting = bank, limits or Limits(), max_waiting
        self._ready = ready
        self._new: list[Job] = []
        self._num_later = 0  # jobs that wait for an operation
        self._jobs: list[Job] = []
        self._operations: deque[Operation] = deque()
        self._works: deque[Work] = deque()
        self._engine: Engine | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="peftkit-serve", daemon=True)

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answers at the next token, and a work after its step; what waits gets an error."""
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
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._ended

    @property
    def num_waiting(self) -> int:
        """Number of prompts that wait."""
        waiting = self._engine.num_waiting if self._engine else 0
        return len(self._new) + self._num_later + waiting

    @property
    def num_running(self) -> int:
        """Number of prompts that are being answered."""
        known = len(self._jobs) + len(self._new) + self._num_later
        return max(0, known - self.num_waiting)

    def room_for(self, ids: Sequence[int], length: int) -> int:
        """Return how many of `length` tokens may follow a prompt, by the context and by memory.

        Raises:
            DataError: The prompt is empty or fills the context.
            RequestError: There is no memory for it.
        """
        room, most = room_left(self.bank.base.model, [ids], length), self.limits.tokens
        if most is not None and len(ids) >= most:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens.",
                found=f"There is memory for {most:,} at once.",
                param="prompt",
            )
        return room if most is None else min(room, most - len(ids))

    def submit(self, jobs: Sequence[Job], first: Callable[[], None] | None = None) -> None:
        """Queue jobs; all of them or none.

        Args:
            first: An operation that they wait for; what it raises is sent to them.

        Raises:
            RequestError: Too many wait already, or the worker has stopped.
        """
        with self._changed:
            self._check_room(self.num_waiting + len(jobs) <= self.max_waiting, self.num_waiting)
            if first is None:
                self._new += jobs
            else:
                done = self.call(first)
                self._num_later += len(jobs)
                done.add_done_callback(partial(self._follow, jobs))
            self._changed.notify_all()

    def _follow(self, jobs: Sequence[Job], done: Future[None]) -> None:
        """Queue jobs that waited for an operation."""
        error = done.exception()
        with self._changed:
            self._num_later -= len(jobs)
            if error is None:
                self._new += jobs
                return
        told = error if isinstance(error, Exception) else _failed("the answer cannot begin", error)
        for job in jobs:
            job.send(told)

    def call(self, operation: Callable[[], T], *, is_taken: bool = False) -> Future[T]:
        """Run an operation in the thread, with the base bare, between two steps of anything else.

        Operations run in the order of their calls.

        Args:
            is_taken: Its client was told that it will run: it does, however many wait.

        Raises:
            RequestError: Too many wait already, or the worker has stopped.
        """
        future: Future[T] = Future()

        def run() -> Callable[[], None]:
            if not future.set_running_or_notify_cancel():
                return lambda: None
            try:
                with torch.enable_grad():
                    result = operation()
            except BaseException as problem:
                return partial(future.set_exception, problem)
            return partial(future.set_result, result)

        with self._changed:
            number = len(self._operations)
            self._check_room(is_taken or number < MAX_OPERATIONS, number, "operations")
            self._operations.append((run, future))
            self._changed.notify_all()
        return future

    def queue(self, work: Work) -> None:
        """Run a work in the thread, one after the other, with the base bare.

        Args:
            work: Called with a function that it calls between its steps: operations and answers
                then have their turn. It handles its own exceptions. When the worker stops, that
                function asks the run of the thread to save and stop (`signals.stop_here`); works
                that have not begun by then never do.
        """
        with self._changed:
            self._works.append(work)
            self._changed.notify_all()

    def _check_room(self, has_room: bool, number: int, what: str = "prompts") -> None:
        if self._ended:
            raise _shutting_down()
        if not has_room:
            raise RequestError(
                "too many requests wait.",
                found=f"{number} {what} wait, and no more may.",
                fix="Try again later.",
                status=429,
                code="queue_full",
            )

    def _work(self) -> None:
        try:
            while self._wait():
                self._turn()
                if self._works and not self._ended:
                    self._run(self._works.popleft())
        except BaseException:
            _LOG.exception("the server cannot go on")
        with self._changed:
            self._ended = True
        self._fail_all(_shutting_down())
        for _, future in self._operations:
            with suppress(InvalidStateError):  # it was cancelled
                future.set_exception(_shutting_down())

    def _wait(self) -> bool:
        """Wait for something to do, without an engine, which would change the model."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._new or self._jobs or self._operations or self._works or self._ended
            )
            return not self._ended

    def _run(self, work: Work) -> None:
        """Run a work, whose steps alternate with turns that last about as long as a step."""
        began = time.monotonic()

        def give_way() -> None:
            nonlocal began
            if self._ended:
                stop_here()
            elif self._new or self._jobs or self._operations:
                seconds = time.monotonic() - began
                with _paused(self.bank.base.model):
                    self._turn(seconds, beside=True)
            began = time.monotonic()

        if self._engine is not None and self._engine.is_idle:
            self._engine = None  # and with it what it has cached
        with self.bank.lifted():
            try:
                work(give_way)
            except BaseException:  # sys.exit() in a client's code, too
                _LOG.exception("a job failed")
        release_memory()

    def _turn(self, seconds: float = 0.0, *, beside: bool = False) -> None:
        """Run the first operation that waits, then answers, as long as is allowed or until idle.

        Args:
            seconds: How long answers may take while something else waits, `STEPS_OF_A_TURN` anyway.
            beside: A work is under way, whose adapter is on the base.
        """
        if self._operations:
            run, _ = self._operations[0]
            with lifted(self.bank.base.model) if beside else self.bank.lifted():
                tell = run()
            tell()  # once the base is as it was
            self._operations.popleft()  # not before: what breaks here is told to who waits for it
        if self._new or self._jobs:
            with self.bank.returned() if beside else nullcontext():
                self._answer(time.monotonic() + seconds, stays=not beside)
            if self._engine is None:  # it failed, and its answers still hold their cache
                release_memory()

    def _answer(self, until: float, *, stays: bool) -> None:
        """Advance the answers, together with those that come meanwhile.

        Args:
            stays: Wait for more when all have ended, unless something else waits.
        """
        steps, has_begun = STEPS_OF_A_TURN, False
        try:
            self._engine = self._engine or self.bank.engine(self.limits)
            with self._engine as engine:
                has_begun = True
                while self._take_new(engine, stays):
                    others = not stays or self._operations or self._works
                    if others and (engine.is_idle or (steps <= 0 and time.monotonic() >= until)):
                        break
                    if not engine.is_idle:
                        self._step(engine)
                    steps -= 1
        except Exception as problem:  # later jobs may well succeed
            _LOG.exception("%d answers failed", len(self._jobs))
            self._engine = None
            self._fail_all(_failed("the model failed", problem), waiting=not has_begun)

    def _step(self, engine: Engine) -> None:
        try:
            engine.step()
        except AnswerTooLarge as error:  # the others go on
            for job in self._jobs:
                if job.completion is error.completion and not job.is_done:
                    job.send(error)

    def _fail_all(self, error: Exception, *, waiting: bool = False) -> None:
        """Tell the jobs that are answered of an error, and those that wait, at the end anyway."""
        with self._changed:
            left, self._jobs = self._jobs, []
            if waiting or self._ended:
                left, self._new = [*left, *self._new], []
        for job in left:
            if not job.is_done:
                job.send(error)

    def _take_new(self, engine: Engine, stays: bool) -> bool:
        """Submit new jobs to the engine; where it has nothing to do, wait. False at the end."""
        self._jobs = [job for job in self._jobs if self._ended or _is_running(job)]

        def has_work() -> bool:
            others = self._operations or self._works or not stays
            return bool(self._new or self._ended or not engine.is_idle or others)

        with self._changed:
            self._changed.wait_for(has_work)
            new, self._new = [job for job in self._new if not job.is_cancelled], []
            self._jobs += new
        for job in new:
            self._begin(engine, job)
        return not self._ended

    def _begin(self, engine: Engine, job: Job) -> None:
        request = replace(job.request, on_token=self._sender(job))
        try:
            self._ready(request.adapter)
            job.completion = engine.submit(request)
        except Exception as problem:  # memory may not take its adapter: the others go on
            is_told = isinstance(problem, PeftkitError)
            job.send(problem if is_told else _failed("the answer cannot begin", problem))
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
            if job.is_done:
                return
            try:
                take(completion)
            except Exception as problem:  # of this answer alone
                _LOG.exception("an answer cannot be read")
                job.is_done = True
                completion.finish()
                job.send(_failed("the answer cannot be read", problem))

        def take(completion: Completion) -> None:
            nonlocal num_sent
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


def own_seed(seed: int | None) -> int:
    """Return a seed, or a new one that does not come from torch's generator.

    A run that trains in the same process draws from that, and has to stay exact.
    """
    return secrets.randbits(62) if seed is None else seed


@contextmanager
def _paused(model: Any) -> Iterator[None]:
    """Have a model in the midst of its training compute as it does outside of it."""
    state = rng.capture(model.device)
    try:
        with (
            original_attention(model),
            eager(model),
            evaluating(model),
            torch.autocast(model.device.type, enabled=False),
        ):
            yield
    finally:
        rng.restore(state, model.device)


def _is_running(job: Job) -> bool:
    return job.completion is not None and job.completion.ended_by is None


def _failed(what: str, problem: BaseException) -> RunError:
    return RunError(f"{what}: {type(problem).__name__}: {problem}")


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down.", status=503, code="shutting_down")
