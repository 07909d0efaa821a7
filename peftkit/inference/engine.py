"""The interface of engines for concurrent completions: requests, completions, limits.

    with open_engine(model, tokenizer) as engine:
        completion = engine.submit(Request(ids, Sampling(max_new_tokens=64)))
        while completion.ended_by is None:
            engine.step()

In a `CachedEngine` completions join and leave the batch at any token. A `PlainEngine` runs batch
after batch.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from peftkit.data.tokens import PromptTooLong
from peftkit.errors import DataError, RunError
from peftkit.execution.out_of_memory import NO_ROOM, attempt, is_out_of_memory
from peftkit.forward.row_lengths import context_length, keep_lengths_apart
from peftkit.inference.ready import on_device, ready_for_tokens
from peftkit.inference.sampling import (
    Chosen,
    Constraint,
    Sampling,
    SamplingTable,
    end_tokens,
    seed_of,
)
from peftkit.model.blocks import is_sharded
from peftkit.model.modes import evaluating
from peftkit.model.places import num_virtual

Ended = Literal["stop", "length", "cancelled"]
AnEngine = TypeVar("AnEngine", bound="Engine")

MAX_ROWS = 64
"""Default maximum of concurrent completions."""
FEWEST_TOKENS = 128
"""Minimum tokens of prompts per forward pass after memory has run out."""

_LOG = logging.getLogger(__name__)
_rows_that_fit: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By model: the reduced limit of rows after memory has run out."""

OnAnswer = Callable[[int], None]
"""Receives the number of completions that have ended, whenever it increases."""
OnFewer = Callable[[int], None]
"""Receives the lowered limit of concurrent completions when memory has run out."""
Use = Callable[[Sequence[str | None]], AbstractContextManager[None]]
"""Switches the model to the adapters of the rows of a batch (`AdapterBank.use`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for one completion.

    Attributes:
        ids: Tokens of the prompt.
        seed: Random seed of its sampling; `sampling.seed` is ignored.
        adapter: A name in the engine's bank; None: do not switch adapters.
        log_probs: Whether to return log-probabilities.
        constraint: Restricts the completion to a grammar.
        keeps: Whether its keys and values stay in the cache after an end token, for a request that
            continues it; see `Engine.release`.
        after: The completion that this continues: `ids` begin with its tokens and its end token.
        on_token: Called after each token, and at the end, in the thread that steps the engine.
        inputs: The model's inputs for a prompt with media, (1, T); for `PlainEngine` only, which
            runs it in a separate batch.
        ends: The only tokens that end it; None: the model's end tokens and `sampling.stops`.
    """

    ids: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    adapter: str | None = None
    log_probs: bool = False
    constraint: Constraint | None = None
    keeps: bool = False
    after: Completion | None = None
    on_token: Callable[[Completion], None] | None = None
    inputs: Mapping[str, Tensor] | None = None
    ends: frozenset[int] | None = None


class Completion:
    """A completion, from its request to its end.

    Attributes:
        ids: Its tokens so far, without the end token.
        chosen: Its tokens and the end token, with log-probabilities.
        max_new_tokens: The requested limit, lowered to the model's context.
        ended_by: stop: an end token or a stop text; length: `max_new_tokens`; cancelled: by the
            caller; None: it is not complete.
        end: The end token.
        error: The error of its grammar that ended it.
    """

    def __init__(self, request: Request, max_new_tokens: int, ends: frozenset[int]) -> None:
        self.request, self.max_new_tokens = request, max_new_tokens
        self.ids: list[int] = []
        self.chosen: list[Chosen] = []
        self.ended_by: Ended | None = None
        self.end: int | None = None
        self.error: RunError | None = None
        self._ends = ends

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens, including the prompt."""
        return len(self.request.ids) + self.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        """Its prompt and its tokens so far."""
        return [*self.request.ids, *self.ids]

    def take(self, chosen: Chosen) -> None:
        """Append the next token."""
        if self.ended_by is not None:
            return
        self.chosen.append(chosen)
        if chosen.token in self._ends:
            self.end, self.ended_by = chosen.token, "stop"
        else:
            self.ids.append(chosen.token)
            if self.request.constraint is not None:
                try:
                    self.request.constraint.take(chosen.token)
                except RunError as error:
                    self.fail(error)
                    return
            if len(self.ids) >= self.max_new_tokens:
                self.ended_by = "length"
        if self.request.on_token is not None:
            self.request.on_token(self)

    def finish(self, why: Ended = "cancelled") -> None:
        """End it, which frees its slot at the next token. Any thread may call this."""
        if self.ended_by is None:
            self.ended_by = why

    def fail(self, error: RunError) -> None:
        """End it with an error; the other completions continue."""
        self.error = error
        self.finish()

    @property
    def log_probs(self) -> list[float]:
        """Log-probabilities of its tokens and the end token, if requested."""
        return [chosen.log_prob for chosen in self.chosen] if self.request.log_probs else []


def log_fewer(number: int) -> None:
    """Log that memory has run out, by default."""
    _LOG.warning("Memory ran out: at most %d concurrent completions from now on.", number)


def masked(logits: Tensor, rows: Sequence[Completion | None]) -> Tensor:
    """Apply the rows' penalties to logits (B, V); -inf: a row's constraint excludes the token."""
    for index, row in enumerate(rows):
        if row is None or row.ended_by is not None:
            continue
        if (penalties := row.request.sampling.penalties) is not None:
            logits[index] = penalties.applied(logits[index], row.request.ids, row.ids)
        if (constraint := row.request.constraint) is not None:
            try:
                allowed = constraint.allowed().to(logits.device)
            except RunError as error:
                row.fail(error)
                continue
            logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
    return logits


def table_of(rows: Sequence[Completion | None], device: torch.device) -> SamplingTable:
    """Return the sampling settings of a batch; rows that are None are greedy."""
    return SamplingTable(
        [Sampling() if row is None else row.request.sampling for row in rows],
        [0 if row is None else row.request.seed for row in rows],
        [0 if row is None else len(row.ids) for row in rows],
        device,
        wants_log_probs=any(row is not None and row.request.log_probs for row in rows),
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an engine.

    Attributes:
        rows: Maximum concurrent completions.
        tokens: Tokens for which the cache allocates memory, unused slots included; None: no limit.
            A completion that needs more runs alone.
        prefill: Tokens of prompts per step; completions do not grow in the meantime.
        prefix_tokens: Tokens of unused shared prefixes that stay in the cache.
        pass_tokens: Tokens of prompts per forward pass.
    """

    rows: int = MAX_ROWS
    tokens: int | None = None
    prefill: int = 1 << 30
    prefix_tokens: int = 0
    pass_tokens: int = 2048


class AnswerTooLarge(RunError):
    """Memory ran out for a single completion; the engine continues without it."""

    def __init__(self, completion: Completion) -> None:
        left = completion.max_new_tokens - len(completion.ids)
        super().__init__(
            "memory ran out during one completion",
            found=f"It has {len(completion.tokens):,} tokens, and up to {left:,} would follow.",
            fix=NO_ROOM,
        )
        self.completion = completion


class Engine(ABC):
    """Generates completions, each with separate settings, adapter and end tokens.

    Within its context the model is in eval mode, and nothing else may run it. If memory runs out,
    running completions are queued again with their tokens, and the limit of concurrent completions
    is halved, also for later engines of the model.

    Attributes:
        num_passes: Forward passes so far.
        ends: Tokens that end every completion.
        can_mix: Returns whether a forward pass may hold rows of several adapters.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        limits: Limits | None = None,
        use: Use | None = None,
        on_fewer: OnFewer | None = None,
    ) -> None:
        limits = limits or Limits()
        rows = min(limits.rows, _rows_that_fit.get(model, limits.rows))
        self.model, self.limits = model, replace(limits, rows=rows)
        self.num_passes = 0
        self.ends = end_tokens(model, tokenizer)
        self._pad = tokenizer.pad_token_id
        self._use, self._on_fewer = use, on_fewer or log_fewer
        self.can_mix: Callable[[], bool] = lambda: True
        self._waiting: deque[Completion] = deque()
        self._stack = ExitStack()

    def __enter__(self: AnEngine) -> AnEngine:
        with on_device(self.model.device), ExitStack() as stack:
            keep_lengths_apart(self.model)
            stack.enter_context(evaluating(self.model))
            self._drop_copies = stack.enter_context(ready_for_tokens(self.model))
            self._prepare(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()
        self._take_back()

    @contextmanager
    def turn(self: AnEngine) -> Iterator[AnEngine]:
        """Enter the context for some steps; running completions keep their cache for the next."""
        self.__enter__()
        try:
            yield self
        finally:
            self._stack.close()
            if not self.num_running:
                self._take_back()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of completions in progress, prompts included."""
        return len(self._running())

    def step(self) -> None:
        """Advance each completion by a token, or run a batch.

        Raises:
            AnswerTooLarge: Memory ran out for a single completion.
        """
        taken: list[Completion] = []

        def advance() -> bool:
            # a new thread's current GPU is the first one
            with on_device(self.model.device):
                self._advance()
            return True

        def ran_out(error: Exception) -> bool:
            # processes that share a base would have to lower their limits together
            return is_out_of_memory(error) and not is_sharded(self.model)

        if attempt(advance, ran_out, undo=lambda: taken.extend(self._take_back())) is None:
            running = [one for one in taken if one.ended_by is None]
            self._waiting.extendleft(reversed(running))
            if running or not taken:  # cancelled ones need no memory any more
                self._take_fewer(running)

    @abstractmethod
    def _advance(self) -> None:
        """Advance each completion by a token, or run a batch."""

    @abstractmethod
    def _take_back(self) -> list[Completion]:
        """Drop all computed state; return the completions in progress, cancelled ones too."""

    def _take_fewer(self, running: Sequence[Completion]) -> None:
        """Drop unpacked copies of weights after memory has run out, then lower the limits.

        Raises:
            AnswerTooLarge: The limits are already minimal.
        """
        if self._drop_copies():
            return
        lower = self._lower_limits(max(len(running), 1))
        if lower is None:
            completion = self._waiting.popleft()
            completion.finish()
            raise AnswerTooLarge(completion)
        if lower.rows < self.limits.rows:
            _rows_that_fit[self.model] = lower.rows
            self._on_fewer(lower.rows)
        self.limits = lower

    def _lower_limits(self, num_running: int) -> Limits | None:
        """Return the limits to try next; None: there are none."""
        return None if num_running == 1 else replace(self.limits, rows=num_running // 2)

    @abstractmethod
    def _prepare(self, stack: ExitStack) -> None:
        """Prepare the model until the stack is closed."""

    def uses(self, adapter: str) -> bool:
        """Return whether a queued or running completion uses an adapter."""
        return any(c.request.adapter == adapter for c in (*self._waiting, *self._running()))

    @abstractmethod
    def forget(self, adapter: str) -> None:
        """Drop cached states of an adapter that changes; no completion may use it."""

    def release(self, completion: Completion) -> None:
        """Drop the cached state of a completion (`Request.keeps`) that is not continued."""
        return None

    @abstractmethod
    def _running(self) -> list[Completion]:
        """Return the completions in progress, prompts included."""

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self.num_running)

    def submit(self, request: Request) -> Completion:
        """Queue a request; raises DataError if the prompt is empty or fills the context."""
        completion = self.completion(request)
        self._waiting.append(completion)
        return completion

    def completion(self, request: Request) -> Completion:
        """Return an empty completion of a request, without queueing it.

        Raises:
            DataError: The prompt is empty or fills the context.
        """
        room = room_left(self.model, [request.ids], request.sampling.max_new_tokens)
        default_ends = self.ends | frozenset(request.sampling.stops)
        return Completion(request, room, default_ends if request.ends is None else request.ends)

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        n: int = 1,
        seeds: Sequence[Sequence[int]] | None = None,
        adapters: Sequence[str | None] | None = None,
        log_probs: bool = True,
        on_answer: OnAnswer | None = None,
    ) -> list[list[Completion]]:
        """Return n completions of each prompt; they share the computation of the prompt.

        Args:
            sampling: Settings of all prompts, or of each.
            seeds: The seeds of each prompt's completions; by default from `sampling.seed`.
            adapters: The adapter of each prompt.
            log_probs: Whether to return log-probabilities.
        """
        settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        names = [None] * len(prompts) if adapters is None else adapters
        groups: dict[int, list[Completion]] = {}
        # Longest first: prompts of similar length are computed together.
        for index in sorted(range(len(prompts)), key=lambda index: -len(prompts[index])):
            prompt_settings = settings[index]
            drawn = (
                seeds[index]
                if seeds
                else [seed_of(prompt_settings, index * n + k) for k in range(n)]
            )
            groups[index] = [
                self.submit(Request(prompts[index], prompt_settings, seed, names[index], log_probs))
                for seed in drawn
            ]
        number = 0
        while not self.is_idle:
            self.step()
            ended = sum(c.ended_by is not None for group in groups.values() for c in group)
            if on_answer is not None and ended > number:
                on_answer(number := ended)
        return [groups[index] for index in range(len(prompts))]

    def run(self) -> None:
        while not self.is_idle:
            self.step()

    def _can_join(self, adapter: str | None, others: Iterable[str | None]) -> bool:
        """Return whether an adapter may run in the forward passes of others."""
        return {*others} <= {adapter} or self.can_mix()

    def _using(self, names: Sequence[str | None]) -> AbstractContextManager[None]:
        return nullcontext() if self._use is None else self._use(names)


def room_left(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Return how many tokens can follow the longest prompt.

    Raises:
        DataError: A prompt is empty, or fills the context (`PromptTooLong`).
    """
    if not all(prompts):
        raise DataError("the prompt is empty: it has no tokens.", fix="Give at least one word.")
    limit = context_length(model.config)
    if limit is None or not prompts:
        return max_new_tokens
    longest = max(len(prompt) for prompt in prompts) + num_virtual(model)
    if longest >= limit:
        raise PromptTooLong(
            f"the prompt leaves no room for an answer: it has {longest:,} tokens.",
            found=f"The context of {type(model).__name__} is {limit:,} tokens.",
            fix="Shorten it.",
        )
    return min(max_new_tokens, limit - longest)
