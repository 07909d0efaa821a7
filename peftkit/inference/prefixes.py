"""What prompts begin with in common: computed once, and kept as long as there is room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from peftkit.inference.cache import Span

MIN_SHARED = 16
"""Tokens that prompts have to have in common."""
MIN_SAVED = 128
"""Tokens that have to be spared; a pass of its own costs about as much."""
MIN_READ = 2048
"""Tokens, times the answers that are spared them, from where on a span is read by all its answers
at once; of less each has a copy, which attention takes in one piece with its own."""


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return of how many tokens both begin alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def worth_sharing(tokens: Sequence[int], others: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Return how many of the first tokens to compute once, and for how many others; or zeros."""
    common = sorted((num_common(tokens, other) for other in others), reverse=True)
    saved, size, users = max(
        ((length * number, length, number) for number, length in enumerate(common, 1)),
        default=(0, 0, 0),
    )
    return (size, users) if size >= MIN_SHARED and saved >= MIN_SAVED else (0, 0)


class Prefixes:
    """Spans from position 0 on that answers may begin with.

    Args:
        max_tokens: Of those that nobody reads now, so many are kept, the latest used.
    """

    def __init__(self, max_tokens: int) -> None:
        self._spans: list[Span] = []
        self._max_tokens = max_tokens
        self._clock = count(1)

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(len(span.tokens) for span in self._spans)

    def add(self, span: Span) -> None:
        """Keep a span, ready or not."""
        self._spans.append(span)
        self.touch(span)

    def find(self, tokens: list[int], adapter: str | None) -> Span | None:
        """Return the longest span that these tokens begin with."""
        found = [
            span
            for span in self._spans
            if span.adapter == adapter and tokens[: len(span.tokens)] == span.tokens
        ]
        return max(found, key=lambda span: len(span.tokens), default=None)

    def touch(self, span: Span) -> None:
        """Note that a span is of use."""
        span.used_at = next(self._clock)

    def trim(self, waiting: Iterable[Sequence[int]]) -> None:
        """Drop what nobody reads, is not what a prompt that waits begins with, and is too much."""
        idle = [span for span in self._spans if not span.num_users and span.is_ready]
        spare = sum(len(span.tokens) for span in idle) - self._max_tokens
        if spare <= 0:
            return
        wanted = [list(tokens) for tokens in waiting]
        for span in sorted(idle, key=lambda span: span.used_at):
            size = len(span.tokens)
            if spare > 0 and not any(tokens[:size] == span.tokens for tokens in wanted):
                self._spans.remove(span)
                spare -= size

    def drop(self) -> None:
        """Drop what nobody reads."""
        self._spans = [span for span in self._spans if span.num_users or not span.is_ready]
