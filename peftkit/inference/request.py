"""What is asked of an engine, and an answer as it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from peftkit.inference.sampling import Chosen, Constraint, Sampling, SamplingTable

Ended = Literal["stop", "length", "cancelled"]


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
