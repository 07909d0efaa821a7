"""The thread that owns the model: it runs one turn after the other.

Operations and training steps run between two tokens of the batch. Which work of an owner is next
is decided by `schedule.Schedule`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from peftkit.execution import rng
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.signals import stop_here
from peftkit.forward.attention import original_attention
from peftkit.inference.bank import AdapterBank
from peftkit.inference.engine import Limits, room_left
from peftkit.model.modes import eager, evaluating, lifted
from peftkit_server.batch import Batch
from peftkit_server.generation import Generation
from peftkit_server.refusals import RequestError
from peftkit_server.schedule import Call, Schedule, Share, check_room, check_share, whole

T = TypeVar("T")

MAX_OPERATIONS = 4096
"""Operations that may wait."""

_LOG = logging.getLogger(__name__)


class TrainingRun(NamedTuple):
    """A long computation, which calls the argument of `run` between two steps."""

    owner: str
    run: Callable[[Callable[[], None]], None]


class Worker:
    """The thread that owns the model. It generates completions and runs operations and training.

    The engine keeps its batch while an operation or a training step runs.

    Args:
        limits: Limits of the engine.
        max_waiting: Most prompts that may wait; further requests are refused.
        share: Returns the part of a limit that one owner may use.
        ready: Called in the thread with the adapter of a generation before it starts.

    Attributes:
        batch: The completions that wait and run.
        is_training: Whether a training run is active.
    """

    def __init__(
        self,
        bank: AdapterBank,
        *,
        limits: Limits | None = None,
        max_waiting: int = 64,
        share: Share = whole,
        ready: Callable[[str | None], None] = lambda adapter: None,
    ) -> None:
        self.bank, self.limits, self.max_waiting = bank, limits or Limits(), max_waiting
        self._share, self.is_training = share, False
        self._changed, self._ended = threading.Condition(), False
        self.batch = Batch(bank, self.limits, share, ready, self._changed)
        self._operations: Schedule[Call] = Schedule()
        self._operation: Call | None = None  # it runs
        self._training_runs: Schedule[TrainingRun] = Schedule()
        self._thread = threading.Thread(target=self._work, name="peftkit-serve", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop completions at the next token and training after its step; fail waiting requests."""
        with self._changed:
            self._ended = True
            self.batch.end()
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
    def num_jobs_waiting(self) -> int:
        """Number of training runs that wait."""
        return len(self._training_runs)

    @property
    def num_operations(self) -> int:
        """Number of operations that wait or run."""
        return len(self._operations) + (self._operation is not None)

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
            self._check_running()
            self.batch.check_room(generations, self.max_waiting)
            owner = generations[0].owner if generations else ""
            self.batch.put(generations, None if first is None else self.call(first, owner))
            self._changed.notify_all()

    def call(
        self, operation: Callable[[], T], owner: str = "", *, is_accepted: bool = False
    ) -> Future[T]:
        """Run an operation in the thread, over the base without adapters.

        The operations of an owner run in the order of their calls, between two steps of training
        or generation.

        Args:
            is_accepted: Whether the client already holds a request id; the queue limit then does
                not apply.

        Raises:
            RequestError: Too many operations wait, or the worker has stopped.
        """
        future: Future[T] = Future()
        with self._changed:
            self._check_running()
            if not is_accepted:
                held, kind = sum(each.owner == owner for each in self._operations), "operations"
                check_room(len(self._operations), 1, MAX_OPERATIONS, kind)
                check_share(held, 1, self._share(MAX_OPERATIONS), kind)
            self._operations.put(Call(owner, operation, future))
            self._changed.notify_all()
        return future

    def queue(self, run: Callable[[Callable[[], None]], None], owner: str = "") -> None:
        """Queue a training run; runs execute one after the other, over the base without adapters.

        Args:
            run: Called with a function that it calls between its steps; the worker then serves
                operations and completions. A run handles its own exceptions. When the worker
                stops, that function makes the run save and stop (`signals.stop_here`). Queued
                runs never start after that.
        """
        with self._changed:
            self._training_runs.put(TrainingRun(owner, run))
            self._changed.notify_all()

    def _check_running(self) -> None:
        if self._ended:
            raise _shutting_down()

    def _work(self) -> None:
        try:
            while self._wait():
                self._serve()
                with self._changed:
                    run = None if self._ended else self._training_runs.take()
                if run is not None:
                    self._train(run)
        except BaseException:
            _LOG.exception("the worker thread failed")
        with self._changed:
            self._ended = True
        self.batch.fail_all(_shutting_down(), waiting=True)
        for operation in (*self._operations, *([self._operation] if self._operation else ())):
            with suppress(InvalidStateError):  # it was cancelled
                operation.future.set_exception(_shutting_down())

    def _wait(self) -> bool:
        """Wait for a request outside the engine, which changes the model. False after `stop`."""
        queues = self._operations, self._training_runs
        with self._changed:
            self._changed.wait_for(lambda: self.batch.has_work or any(queues) or self._ended)
            return not self._ended

    def _train(self, run: TrainingRun) -> None:
        """Execute a training run; a turn between two steps lasts about as long as a step."""
        began = time.monotonic()

        def yield_model() -> None:
            nonlocal began
            if self._ended:
                stop_here()
            elif self.batch.has_work or self._operations:
                seconds = time.monotonic() - began
                with _paused(self.bank.base.model):
                    self._serve(seconds, in_training=True)
            began = time.monotonic()

        self.batch.free_cache()
        self.is_training = True
        with self.bank.lifted():
            try:
                run.run(yield_model)
            except BaseException:  # including sys.exit() in a client's code
                _LOG.exception("a training run failed")
        self.is_training = False
        release_memory()

    def _serve(self, seconds: float = 0.0, *, in_training: bool = False) -> None:
        """Run the next operation, then the batch until it is idle or its time is over.

        Args:
            seconds: Time of the batch while other work waits.
            in_training: Whether a training run is active, with its adapter on the base.
        """
        with self._changed:
            operation = self._operation = self._operations.take()
        if operation is not None:
            bare = lifted(self.bank.base.model) if in_training else self.bank.lifted()
            with torch.enable_grad(), bare:
                set_result = operation.run()
            set_result()  # after the adapters are back on the base
            self._operation = None  # last: if this thread fails above, `_work` fails its future
        if self.batch.has_work:
            with self.bank.returned() if in_training else nullcontext():
                self.batch.run(
                    time.monotonic() + seconds,
                    lambda: in_training or bool(self._operations or self._training_runs),
                )


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
