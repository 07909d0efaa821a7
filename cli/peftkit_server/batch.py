"""The turn of completions: continuous batching over one engine."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from peftkit.errors import PeftkitError
from peftkit.execution.out_of_memory import release_memory
from peftkit.inference.bank import AdapterBank
from peftkit.inference.engine import AnswerTooLarge, Engine, Limits
from peftkit_server.generation import Generation, failure
from peftkit_server.schedule import Schedule, Share, check_room, check_share

MIN_STEPS = 16
"""Tokens that the batch generates, at least, before other waiting work runs."""
MANY = 1 << 30

_LOG = logging.getLogger(__name__)


class Batch:
    """Completions that wait or run. Requests join and leave the engine's batch at any token.

    Args:
        share: Returns the part of a limit that one owner may use.
        ready: Called in the worker's thread with the adapter of a generation before it starts.
        changed: Lock of the queues, notified of new work.

    Attributes:
        num_prompt, num_generated: Tokens of prompts that have begun, of completions that have
            ended, since the start.
    """

    def __init__(
        self,
        bank: AdapterBank,
        limits: Limits,
        share: Share,
        ready: Callable[[str | None], None],
        changed: threading.Condition,
    ) -> None:
        self._bank, self._limits = bank, limits
        self._share, self._ready, self._changed = share, ready, changed
        self.num_prompt = self.num_generated = 0
        self._new: Schedule[Generation] = Schedule()
        self._deferred: list[Generation] = []  # they wait for an operation
        self._active: list[Generation] = []
        self._engine: Engine | None = None
        self._ended = False

    @property
    def has_work(self) -> bool:
        """Whether completions wait or run."""
        return bool(self._new or self._active)

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

    def check_room(self, generations: Sequence[Generation], most: int) -> None:
        """Raise unless all generations may wait.

        Args:
            most: Most prompts that may wait.

        Raises:
            RequestError: 429: too many prompts wait, or too many of the owner wait or run.
        """
        check_room(self.num_waiting, len(generations), most, "prompts")
        if generations and (share := self._share(most)) < most:
            owner = generations[0].owner
            held = sum(
                each.owner == owner and not (each.is_done or each.is_cancelled)
                for each in (*self._new, *self._deferred, *self._active)
            )
            share += self._share(self._limits.rows)
            check_share(held, len(generations), share, "prompts")

    def put(self, generations: Sequence[Generation], after: Future[None] | None = None) -> None:
        """Queue generations.

        Args:
            after: An operation that they wait for; they receive its exception.
        """
        if after is None:
            for generation in generations:
                self._new.put(generation)
        else:
            self._deferred += generations
            after.add_done_callback(lambda done: self._follow(generations, done))

    def _follow(self, generations: Sequence[Generation], done: Future[None]) -> None:
        problem = done.exception()
        with self._changed:
            self._deferred = [each for each in self._deferred if each not in generations]
            if problem is None:
                self.put(generations)
                return
        if not isinstance(problem, Exception):
            problem = failure("the completion cannot start", problem)
        for generation in generations:
            generation.send(problem)

    def end(self) -> None:
        """Stop completions at the next token."""
        self._ended = True
        for generation in self._active:
            if generation.completion is not None:
                generation.completion.finish()

    def free_cache(self) -> None:
        """Free the engine with its KV cache if it is idle."""
        if self._engine is not None and self._engine.is_idle:
            self._engine = None

    def run(self, until: float, others: Callable[[], bool]) -> None:
        """Step the engine; new requests join its batch.

        Args:
            until: When `time.monotonic()` ends the turn if other work waits, but `MIN_STEPS` run
                in any case.
            others: Whether other work waits; otherwise an idle engine waits for requests.
        """
        self._generate(until, others)
        if self._engine is None:  # it failed: frames of `_generate` held its completions' cache
            release_memory()

    def _generate(self, until: float, others: Callable[[], bool]) -> None:
        steps, has_begun = MIN_STEPS, False
        try:
            self._engine = self._engine or self._bank.engine(self._limits)
            with self._engine.turn() as engine:
                has_begun = True
                while self._admit(engine, others):
                    is_over = engine.is_idle or (steps <= 0 and time.monotonic() >= until)
                    if is_over and others():
                        break
                    if not engine.is_idle:
                        self._step(engine)
                    steps -= 1
        except Exception as problem:  # later requests may succeed
            _LOG.exception("%d completions failed", len(self._active))
            self._engine = None
            self.fail_all(failure("the model failed", problem), waiting=not has_begun)

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

    def fail_all(self, error: Exception, *, waiting: bool) -> None:
        """Send an error to all active generations; at `waiting` to waiting ones, too."""
        with self._changed:
            failed, self._active = self._active, []
            self._count(failed)
            if waiting:
                failed, self._new = [*failed, *self._new], Schedule()
        for generation in failed:
            if not generation.is_done:
                generation.send(error)

    def _admit(self, engine: Engine, others: Callable[[], bool]) -> bool:
        """Submit new generations to the engine; wait if it is idle. False after `end`."""
        self._count([each for each in self._active if not (self._ended or each.is_running)])
        self._active = [each for each in self._active if self._ended or each.is_running]
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._new or self._ended or not engine.is_idle or others())
            )
            new = admitted(self._new, self._active, self._limits, self._share)
            self._active += new
        for generation in new:
            self._begin(engine, generation)
        return not self._ended

    def _count(self, ended: Sequence[Generation]) -> None:
        completions = [each.completion for each in ended if each.completion is not None]
        self.num_generated += sum(len(completion.chosen) for completion in completions)

    def _begin(self, engine: Engine, generation: Generation) -> None:
        on_token = generation.sender(self._bank.base.tokenizer)
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


def admitted(
    waiting: Schedule[Generation], active: Sequence[Generation], limits: Limits, share: Share
) -> list[Generation]:
    """Take the waiting generations that may run now, the owners in turn.

    Each of several owners has a share of the rows of the batch and of the tokens in memory, and
    no generation waits in the engine's own queue. A generation that exceeds the share of tokens
    runs if its owner has no other.
    """
    waiting.drop(lambda each: each.is_cancelled)
    rows, is_shared = share(limits.rows), share(MANY) < MANY
    most_tokens = None if limits.tokens is None else share(limits.tokens)
    running = [*active]
    held, held_tokens = Counter[str](), Counter[str]()

    def note(each: Generation) -> None:
        held[each.owner] += 1
        held_tokens[each.owner] += each.num_tokens

    def fits(each: Generation) -> bool:
        if not is_shared:
            return True
        total = held_tokens[each.owner] + each.num_tokens
        has_memory = most_tokens is None or total <= most_tokens or not held[each.owner]
        return len(running) < limits.rows and held[each.owner] < rows and has_memory

    for each in active:
        note(each)
    while (taken := waiting.take(fits)) is not None:
        running.append(taken)
        note(taken)
    return running[len(active) :]
