"""The thread that owns the model: continuous batching, operations and training runs.

Requests join and leave the engine's batch at any token. Operations and training steps run between
two tokens of the batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from peftkit.errors import PeftkitError
from peftkit.execution import rng
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.signals import stop_here
from peftkit.forward.attention import original_attention
from peftkit.inference.bank import AdapterBank
from peftkit.inference.engine import AnswerTooLarge, Engine, Limits, room_left
from peftkit.model.lift import lifted
from peftkit.model.modes import eager, evaluating
from peftkit_server.fairness import Share, admissible, check_owner
from peftkit_server.generation import Generation, failure
from peftkit_server.refusals import RequestError

T = TypeVar("T")
Operation = tuple[Callable[[], Callable[[], None]], Future[Any]]
TrainingRun = Callable[[Callable[[], None]], None]
"""A long computation, which calls its argument between two steps."""

MIN_STEPS = 16
"""Tokens that the batch generates, at least, before a waiting operation or training step runs."""
MAX_OPERATIONS = 4096
"""Operations that may wait."""

_LOG = logging.getLogger(__name__)


class Worker:
    """The thread that owns the model. It generates completions and runs operations and training.

    The engine keeps its batch while an operation or a training step runs.

    Args:
        limits: Limits of the engine.
        max_waiting: Most prompts that may wait; further requests are refused.
        share: Returns the part of a limit that one owner may use.
        ready: Called in the thread with the adapter of a generation before it starts.

    Attributes:
        num_prompt, num_generated: Tokens of prompts that have begun, of completions that have
            ended, since the start.
        is_training: Whether a training run is active.
    """

    def __init__(
        self,
        bank: AdapterBank,
        *,
        limits: Limits | None = None,
        max_waiting: int = 64,
        share: Share = lambda total: total,
        ready: Callable[[str | None], None] = lambda adapter: None,
    ) -> None:
        self.bank, self.limits, self.max_waiting = bank, limits or Limits(), max_waiting
        self._ready, self._share = ready, share
        self.num_prompt = self.num_generated = 0
        self.is_training = False
        self._new: list[Generation] = []
        self._deferred: list[Generation] = []  # they wait for an operation
        self._active: list[Generation] = []
        self._operations: deque[Operation] = deque()
        self._training_runs: deque[TrainingRun] = deque()
        self._engine: Engine | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="peftkit-serve", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop completions at the next token and training after its step; fail waiting requests."""
        with self._changed:
            self._ended = True
            for generation in self._active:
                if generation.completion is not None:
                    generation.completion.finish()
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
        engine = self._engine  # the worker's thread may replace it
        waiting = engine.num_waiting if engine else 0
        return len(self._new) + len(self._deferred) + waiting

    @property
    def num_running(self) -> int:
        """Number of prompts for which the engine generates tokens."""
        total = len(self._active) + len(self._new) + len(self._deferred)
        return max(0, total - self.num_waiting)

    @property
    def num_jobs_waiting(self) -> int:
        """Number of training runs that wait."""
        return len(self._training_runs)

    @property
    def num_operations(self) -> int:
        """Number of operations that wait or run."""
        return len(self._operations)

    def room_for(self, ids: Sequence[int], length: int) -> int:
        """Return how many of `length` tokens may follow a prompt, by the context and by memory.

        Raises:
            DataError: The prompt is empty or fills the context.
            RequestError: The prompt does not fit in memory.
        """
        room, max_tokens = room_left(self.bank.base.model, [ids], length), self.limits.tokens
        if max_tokens is not None and len(ids) >= max_tokens:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens.",
                found=f"The server has memory for {max_tokens:,} tokens.",
                param="prompt",
            )
        return room if max_tokens is None else min(room, max_tokens - len(ids))

    def submit(
        self, generations: Sequence[Generation], first: Callable[[], None] | None = None
    ) -> None:
        """Queue all generations, or none of them.

        Args:
            first: An operation that runs before them; they receive its exception.

        Raises:
            RequestError: Too many prompts wait, or the worker has stopped.
        """
        with self._changed:
            waiting = self.num_waiting
            self._check_room(waiting + len(generations) <= self.max_waiting, waiting, "prompts")
            if generations and (most := self._share(self.max_waiting)) < self.max_waiting:
                held = (*self._new, *self._deferred, *self._active)
                check_owner(generations, held, most + self._share(self.limits.rows))
            if first is None:
                self._new += generations
            else:
                done = self.call(first)
                self._deferred += generations
                done.add_done_callback(partial(self._follow, generations))
            self._changed.notify_all()

    def _follow(self, generations: Sequence[Generation], done: Future[None]) -> None:
        """Queue generations that waited for an operation, or send them its exception."""
        problem = done.exception()
        with self._changed:
            self._deferred = [each for each in self._deferred if each not in generations]
            if problem is None:
                self._new += generations
                return
        if not isinstance(problem, Exception):
            problem = failure("the completion cannot start", problem)
        for generation in generations:
            generation.send(problem)

    def call(self, operation: Callable[[], T], *, is_accepted: bool = False) -> Future[T]:
        """Run an operation in the thread, over the base without adapters.

        Operations run in the order of their calls, between two steps of training or generation.

        Args:
            is_accepted: Whether the client already holds a request id; the queue limit then does
                not apply.

        Raises:
            RequestError: Too many operations wait, or the worker has stopped.
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
            self._check_room(is_accepted or number < MAX_OPERATIONS, number, "operations")
            self._operations.append((run, future))
            self._changed.notify_all()
        return future

    def queue(self, run: TrainingRun) -> None:
        """Queue a training run; runs execute one after the other, over the base without adapters.

        Args:
            run: Called with a function that it calls between its steps; the worker then serves
                operations and completions. A run handles its own exceptions. When the worker
                stops, that function makes the run save and stop (`signals.stop_here`). Queued
                runs never start after that.
        """
        with self._changed:
            self._training_runs.append(run)
            self._changed.notify_all()

    def _check_room(self, has_room: bool, number: int, kind: str) -> None:
        if self._ended:
            raise _shutting_down()
        if not has_room:
            raise RequestError(
                "too many requests wait.",
                found=f"{number} {kind} wait, and no more may.",
                fix="Try again later.",
                status=429,
                code="queue_full",
            )

    def _work(self) -> None:
        try:
            while self._wait():
                self._turn()
                if self._training_runs and not self._ended:
                    self._train(self._training_runs.popleft())
        except BaseException:
            _LOG.exception("the worker thread failed")
        with self._changed:
            self._ended = True
        self._fail_all(_shutting_down())
        for _, future in self._operations:
            with suppress(InvalidStateError):  # it was cancelled
                future.set_exception(_shutting_down())

    def _wait(self) -> bool:
        """Wait for a request outside the engine, which changes the model. False after `stop`."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._new
                    or self._active
                    or self._operations
                    or self._training_runs
                    or self._ended
                )
            )
            return not self._ended

    def _train(self, run: TrainingRun) -> None:
        """Execute a training run; a turn between two steps lasts about as long as a step."""
        began = time.monotonic()

        def yield_model() -> None:
            nonlocal began
            if self._ended:
                stop_here()
            elif self._new or self._active or self._operations:
                seconds = time.monotonic() - began
                with _paused(self.bank.base.model):
                    self._turn(seconds, in_training=True)
            began = time.monotonic()

        if self._engine is not None and self._engine.is_idle:
            self._engine = None  # frees its KV cache
        self.is_training = True
        with self.bank.lifted():
            try:
                run(yield_model)
            except BaseException:  # including sys.exit() in a client's code
                _LOG.exception("a training run failed")
        self.is_training = False
        release_memory()

    def _turn(self, seconds: float = 0.0, *, in_training: bool = False) -> None:
        """Run the first waiting operation, then the engine until it is idle or its time is over.

        Args:
            seconds: Time of the engine while other work waits; it takes `MIN_STEPS` in any case.
            in_training: Whether a training run is active, with its adapter on the base.
        """
        if self._operations:
            run, _ = self._operations[0]
            with lifted(self.bank.base.model) if in_training else self.bank.lifted():
                set_result = run()
            set_result()  # after the adapters are back on the base
            self._operations.popleft()  # last: if this thread fails above, `_work` fails its future
        if self._new or self._active:
            with self.bank.returned() if in_training else nullcontext():
                self._generate(time.monotonic() + seconds, stays=not in_training)
            if self._engine is None:  # the engine failed: its completions still hold their cache
                release_memory()

    def _generate(self, until: float, *, stays: bool) -> None:
        """Step the engine; new requests join its batch.

        Args:
            stays: Wait for requests when the engine is idle, unless other work waits.
        """
        steps, has_begun = MIN_STEPS, False
        try:
            self._engine = self._engine or self.bank.engine(self.limits)
            with self._engine.turn() as engine:
                has_begun = True
                while self._admit(engine, stays):
                    others = not stays or self._operations or self._training_runs
                    if others and (engine.is_idle or (steps <= 0 and time.monotonic() >= until)):
                        break
                    if not engine.is_idle:
                        self._step(engine)
                    steps -= 1
        except Exception as problem:  # later requests may succeed
            _LOG.exception("%d completions failed", len(self._active))
            self._engine = None
            self._fail_all(failure("the model failed", problem), waiting=not has_begun)

    def _step(self, engine: Engine) -> None:
        try:
            engine.step()
        except AnswerTooLarge as error:  # the other completions continue
            for generation in self._active:
                if generation.completion is error.completion and not generation.is_done:
                    generation.send(error)
        for generation in self._active:
            completion = generation.completion
            if completion is not None and completion.error and not generation.is_done:
                generation.send(completion.error)

    def _fail_all(self, error: Exception, *, waiting: bool = False) -> None:
        """Send an error to all active generations; at `waiting` or the end to waiting ones, too."""
        with self._changed:
            failed, self._active = self._active, []
            self._count(failed)
            if waiting or self._ended:
                failed, self._new = [*failed, *self._new], []
        for generation in failed:
            if not generation.is_done:
                generation.send(error)

    def _admit(self, engine: Engine, stays: bool) -> bool:
        """Submit new generations to the engine; wait if it is idle. False after `stop`."""
        self._count([each for each in self._active if not (self._ended or each.is_running)])
        self._active = [each for each in self._active if self._ended or each.is_running]

        def has_work() -> bool:
            others = self._operations or self._training_runs or not stays
            return bool(self._new or self._ended or not engine.is_idle or others)

        with self._changed:
            self._changed.wait_for(has_work)
            new, self._new = admissible(self._new, self._active, self.limits, self._share)
            self._active += new
        for generation in new:
            self._begin(engine, generation)
        return not self._ended

    def _count(self, ended: Sequence[Generation]) -> None:
        completions = [each.completion for each in ended if each.completion is not None]
        self.num_generated += sum(len(completion.chosen) for completion in completions)

    def _begin(self, engine: Engine, generation: Generation) -> None:
        on_token = generation.sender(self.bank.base.tokenizer)
        request = replace(generation.request, on_token=on_token)
        try:
            self._ready(request.adapter)
            generation.completion = engine.submit(request)
            self.num_prompt += len(request.ids)
        except Exception as problem:  # its adapter may not fit in memory: the others continue
            is_ours = isinstance(problem, PeftkitError)
            generation.send(problem if is_ours else failure("the completion cannot start", problem))
            generation.is_cancelled = True
        if generation.is_cancelled:
            generation.cancel()


@contextmanager
def _paused(model: Any) -> Iterator[None]:
    """Run a model outside of its training, with its random state restored afterwards."""
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


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down.", status=503, code="shutting_down")
