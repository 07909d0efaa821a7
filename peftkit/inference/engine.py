"""Answers of a model, many at once: what is asked of an engine, and what every engine has.

    with open_engine(model, tokenizer) as engine:
        running = engine.submit(Request(ids, Sampling(max_new_tokens=64)))
        while running.ended_by is None:
            engine.step()

`CachedEngine` has rows join and leave at any token; `PlainEngine` answers batch after batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftkit.base.sharding import is_sharded
from peftkit.errors import DataError
from peftkit.execution.plan import plan_of
from peftkit.inference.sampling import (
    Chosen,
    Constraint,
    Sampling,
    SamplingTable,
    end_tokens,
    seed_of,
)
from peftkit.kernels.packing import copies_kept
from peftkit.model.modes import evaluating, prepared_for_serving
from peftkit.tasks.length import num_virtual
from peftkit.tasks.loss import find_head

Ended = Literal["stop", "length", "cancelled"]
AnEngine = TypeVar("AnEngine", bound="Engine")

COPY_SHARE = 0.5
"""Of the free main memory that unpacked weights may take meanwhile."""
MAX_ROWS = 64
"""Answers that grow at once."""

OnAnswer = Callable[[int], None]
"""Is told the number of answers that are over, as it grows."""
Use = Callable[[Sequence[str | None]], AbstractContextManager[None]]
"""Switches the model to the adapters of the rows of a batch (`AdapterBank.use`)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is over.

    Attributes:
        ids: Its tokens, without the one that ended it.
        log_probs: Of each token, and of the one that ended it, if asked for.
        ended_by: stop: an end token, or a text that was to end it; length: its maximum, or the
            model's context; cancelled: nobody wanted the rest.
        end: The token that ended it.
    """

    ids: list[int]
    log_probs: list[float]
    ended_by: Ended
    end: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One answer that is wanted.

    Attributes:
        ids: Tokens of the prompt.
        seed: Of its sampling; `sampling.seed` is not read.
        adapter: A name in the engine's bank; None is the model as it is.
        log_probs: Whether log-probabilities are wanted.
        constraint: What the answer may consist of.
        on_token: Called after each token, and at the end, in the thread that steps the engine.
        inputs: All that a model with images reads of the prompt, (1, T); for `PlainEngine` alone,
            which answers it by itself.
    """

    ids: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    adapter: str | None = None
    log_probs: bool = False
    constraint: Constraint | None = None
    on_token: Callable[[Running], None] | None = None
    inputs: Mapping[str, Tensor] | None = None


class Running:
    """An answer from its request to its end.

    Attributes:
        ids: Its tokens so far. chosen: What was chosen for each, the one that ended it too.
        max_new_tokens: As asked, or less by the model's context.
        ended_by: None while it goes on.
    """

    def __init__(self, request: Request, max_new_tokens: int, ends: frozenset[int]) -> None:
        self.request, self.max_new_tokens = request, max_new_tokens
        self.ids: list[int] = []
        self.chosen: list[Chosen] = []
        self.ended_by: Ended | None = None
        self.end: int | None = None
        self._ends = ends

    @property
    def num_tokens(self) -> int:
        """Most tokens that it has, with its prompt."""
        return len(self.request.ids) + self.max_new_tokens

    def take(self, chosen: Chosen) -> None:
        """Take the next token."""
        if self.ended_by is not None:
            return
        self.chosen.append(chosen)
        if chosen.token in self._ends:
            self.end, self.ended_by = chosen.token, "stop"
        else:
            self.ids.append(chosen.token)
            if self.request.constraint is not None:
                self.request.constraint.take(chosen.token)
            if len(self.ids) >= self.max_new_tokens:
                self.ended_by = "length"
        self.tell()

    def tell(self) -> None:
        """Let it be known how far it is."""
        if self.request.on_token is not None:
            self.request.on_token(self)

    def finish(self, why: Ended = "cancelled") -> None:
        """End it: its place is free at the next token. It may be called by any thread."""
        if self.ended_by is None:
            self.ended_by = why

    @property
    def answer(self) -> Answer:
        """What came of it."""
        assert self.ended_by is not None, "it goes on"
        told = [one.log_prob for one in self.chosen] if self.request.log_probs else []
        return Answer(self.ids, told, self.ended_by, self.end)


def masked(logits: Tensor, rows: Sequence[Running | None]) -> Tensor:
    """Return logits (B, V) in which what a row's constraint does not allow is -inf."""
    for index, row in enumerate(rows):
        constraint = None if row is None else row.request.constraint
        if constraint is not None and row is not None and row.ended_by is None:
            allowed = constraint.allowed().to(logits.device)
            logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
    return logits


def table_of(rows: Sequence[Running | None], device: torch.device) -> SamplingTable:
    """Return how the next tokens of some answers are chosen; None: of no answer, greedily."""
    return SamplingTable(
        [Sampling() if row is None else row.request.sampling for row in rows],
        [0 if row is None else row.request.seed for row in rows],
        [0 if row is None else len(row.ids) for row in rows],
        device,
        wants_log_probs=any(row is not None and row.request.log_probs for row in rows),
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine takes on at once.

    Attributes:
        rows: Answers that grow at once.
        tokens: Of prompts and answers, whose keys and values are held; None: as many as come. An
            answer that alone needs more is made alone.
        prefill: Tokens of prompts in a step; while they are computed, answers do not grow.
        kept: Tokens of common beginnings that are kept when nobody reads them.
    """

    rows: int = MAX_ROWS
    tokens: int | None = None
    prefill: int = 1 << 30
    kept: int = 0


class Engine(ABC):
    """Makes answers, each with its own settings, adapter and end.

    Within its context the model is in eval mode, and it must not be called by others.

    Attributes:
        num_passes: Forward passes so far.
        ends: Tokens that end every answer.
    """

    def __init__(
        self, model: Any, tokenizer: Any, limits: Limits | None = None, use: Use | None = None
    ) -> None:
        self.model, self.limits = model, limits or Limits()
        self.num_passes = 0
        self.ends = end_tokens(model, tokenizer)
        self._pad = tokenizer.pad_token_id
        self._use = use
        self._waiting: deque[Running] = deque()
        self._stack = ExitStack()

    def __enter__(self: AnEngine) -> AnEngine:
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.model))
            stack.enter_context(ready_for_tokens(self.model))
            self._prepare(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Answers that grow, or whose prompts are computed."""

    @abstractmethod
    def step(self) -> None:
        """Go on with what was submitted: by a token of each answer, or by a batch."""

    @abstractmethod
    def _prepare(self, stack: ExitStack) -> None:
        """Make the model ready, until the stack is closed."""

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self.num_running)

    def submit(self, request: Request) -> Running:
        """Let an answer be made by the steps that follow.

        Raises:
            DataError: The prompt is empty or fills the context.
        """
        running = self.running(request)
        self._waiting.append(running)
        return running

    def running(self, request: Request) -> Running:
        """Return an answer that has not begun.

        Raises:
            DataError: The prompt is empty or fills the context.
        """
        room = room_left(self.model, [request.ids], request.sampling.max_new_tokens)
        return Running(request, room, self.ends | frozenset(request.sampling.stops))

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
    ) -> list[list[Answer]]:
        """Return n answers to each prompt; a prompt is computed once for all of its answers.

        Args:
            sampling: Of all prompts, or of each.
            seeds: Of each prompt one for each answer; by default made of `sampling.seed`.
            adapters: Of each prompt.
            log_probs: Return the log-probability of each token too.
        """
        settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        names = [None] * len(prompts) if adapters is None else adapters
        made: dict[int, list[Running]] = {}
        # Longest first: those of like length are computed together.
        for index in sorted(range(len(prompts)), key=lambda index: -len(prompts[index])):
            one, ids, name = settings[index], prompts[index], names[index]
            drawn = seeds[index] if seeds else [seed_of(one, index * n + k) for k in range(n)]
            made[index] = [self.submit(Request(ids, one, seed, name, log_probs)) for seed in drawn]
        number = 0
        while not self.is_idle:
            self.step()
            over = sum(one.ended_by is not None for of in made.values() for one in of)
            if on_answer is not None and over > number:
                on_answer(number := over)
        return [[one.answer for one in made[index]] for index in range(len(prompts))]

    def run(self) -> None:
        while not self.is_idle:
            self.step()

    def _using(self, names: Sequence[str | None]) -> AbstractContextManager[None]:
        return nullcontext() if self._use is None else self._use(names)


def room_left(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Return how many tokens may follow the longest prompt."""
    if not all(prompts):
        raise DataError("the prompt is empty: it has no tokens.", fix="Give at least one word.")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or not prompts:
        return max_new_tokens
    longest = max(len(prompt) for prompt in prompts) + num_virtual(model)
    if longest >= limit:
        raise DataError(
            f"the prompt leaves no room for an answer: it has {longest:,} tokens.",
            found=f"The context of {type(model).__name__} is {limit:,} tokens.",
            fix="Shorten it.",
        )
    return min(max_new_tokens, int(limit) - longest)


@contextmanager
def ready_for_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Have ready within the context what each token needs: unpacked weights, A and B as copies."""
    share = 0.0 if is_sharded(model) else COPY_SHARE
    with (
        copies_kept(model, share),
        prepared_for_serving(model, plan_of(model)),
        _rows_for_the_head(model),
    ):
        yield


@contextmanager
def _rows_for_the_head(model: PreTrainedModel) -> Iterator[None]:
    """Give the head rows that lie one after the other.

    Of a prompt's hidden rows transformers takes the last ones, as a view with gaps; torch's product
    of such a view with a weight copies the weight for each row of the batch.
    """
    head = find_head(model)
    if head is None:
        yield
        return

    def joined(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args)

    handle = head.register_forward_pre_hook(joined)
    try:
        yield
    finally:
        handle.remove()
