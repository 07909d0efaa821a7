"""Keys and values of many answers at once, each written where it stays.

A prompt's are made piece by piece in a `Span` of just its size. A span that several answers begin
with is kept and read by all of them; any other moves into an `Arena`, in whose slots answers of
about equal length grow, a token at a time, without a copy. An answer that outgrows its arena moves
to one of twice the length. What prompts begin with in common is computed once (`Prefixes`), and
kept as long as there is room.

Shapes: S slots, K heads of keys, C tokens of a slot, P tokens of a span, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
SMALLEST = 128
"""Tokens of a slot in the smallest arena."""
MIN_SHARED = 16
"""Tokens that prompts have to have in common."""
MIN_SAVED = 128
"""Tokens that have to be spared; a pass of its own costs about as much."""
MIN_READ = 2048
"""Tokens, times the answers that are spared them, from where on a span is read by all its answers
at once; of less each has a copy, which attention takes in one piece with its own."""


@dataclass(eq=False)
class Span:
    """Keys and values of consecutive tokens of one sequence.

    Attributes:
        tokens: Those that it is for. start: Position of the first.
        filled: How many are there already.
        layers: Of each layer (1, K, P, D) twice; made when a layer is first written.
        adapter: Whose keys and values they are.
        base: A span that it goes on from, without a copy.
        is_read: Whether answers read it where it is; else each takes a copy.
        num_users: Answers that read it now. used_at: When it was last of use.
    """

    tokens: list[int]
    adapter: str | None
    start: int = 0
    filled: int = 0
    layers: dict[int, Pair] = field(default_factory=dict)
    base: Span | None = None
    is_read: bool = False
    num_users: int = 0
    used_at: int = 0

    @property
    def end(self) -> int:
        """Position after the last token that is there."""
        return self.start + self.filled

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.filled

    @property
    def is_ready(self) -> bool:
        return self.filled == len(self.tokens)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write (1, K, T, D) after what is there; `filled` is not changed."""
        if layer not in self.layers:
            self.layers[layer] = (self._like(keys), self._like(values))
        size = keys.shape[2]
        for kept, new in zip(self.layers[layer], (keys, values), strict=True):
            kept[:, :, self.filled : self.filled + size] = new

    def _like(self, new: Tensor) -> Tensor:
        return new.new_empty(1, new.shape[1], len(self.tokens), new.shape[3])

    def copy_from(self, other: Span) -> None:
        """Begin with the tokens of another span, which begins where this one does."""
        for layer, (keys, values) in other.layers.items():
            self.write(layer, keys[:, :, : other.filled], values[:, :, : other.filled])
        self.filled = other.filled


@dataclass(eq=False)
class Row:
    """An answer that grows in an arena.

    Attributes:
        owner: Whose it is.
        base: A span that it begins with, read by others too.
        length: Its own tokens after that whose keys and values are there.
        slot: Where in the arena.
    """

    owner: Any
    base: Span | None
    length: int
    arena: Arena | None = None
    slot: int = 0

    @property
    def start(self) -> int:
        """Position of the first token of its own."""
        return 0 if self.base is None else self.base.end

    @property
    def has_room(self) -> bool:
        """Whether its slot has a place for its next token."""
        return self.arena is not None and self.length < self.arena.capacity

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Its place for the next token, the position of its first, and that token."""
        owner = self.owner
        return self.length, self.start, (owner.ids or owner.request.ids)[-1]


class Arena:
    """Slots of one size. The rows in it have the first slots, in the order of `rows`.

    Attributes:
        capacity: Tokens of a slot.
        num_slots: As many as there have been rows at once, or more; a power of two.
        layers: Of each layer (S, K, C, D) twice.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_slots = capacity, 1
        self.rows: list[Row] = []
        self.layers: dict[int, Pair] = {}

    @property
    def is_full(self) -> bool:
        """Whether one row more needs larger tensors."""
        return len(self.rows) == self.num_slots

    def add(self, row: Row, layers: dict[int, Pair]) -> None:
        """Give a row the next slot, and copy what it has: of each layer (1, K, >= length, D)."""
        if self.is_full:
            self.num_slots *= 2
        row.arena, row.slot = self, len(self.rows)
        self.rows.append(row)
        for layer, pair in layers.items():
            for kept, new in zip(self._room(layer, pair), pair, strict=True):
                kept[row.slot, :, : row.length] = new[0, :, : row.length]

    def remove(self, row: Row, slot: int) -> None:
        """Take a row out of its slot; the last one gets it."""
        last = self.rows.pop()
        if last is row:
            return
        for pair in self.layers.values():
            for kept in pair:
                if len(kept) > last.slot:
                    kept[slot, :, : last.length] = kept[last.slot, :, : last.length]
        self.rows[slot], last.slot = last, slot

    def of_row(self, row: Row) -> dict[int, Pair]:
        """Return what is there of a row: of each layer (1, K, C, D) twice."""
        at = slice(row.slot, row.slot + 1)
        return {layer: (keys[at], values[at]) for layer, (keys, values) in self.layers.items()}

    def write(self, layer: int, places: Pair, keys: Tensor, values: Tensor) -> Pair:
        """Write one token of each of the first slots, (b, K, 1, D); return all of the layer.

        Args:
            places: Of each row its slot, and the place in it.
        """
        pair = self._room(layer, (keys, values))
        for kept, new in zip(pair, (keys, values), strict=True):
            kept[places[0], :, places[1]] = new[:, :, 0]
        return pair

    def _room(self, layer: int, like: Pair) -> Pair:
        """Return a layer's tensors, with all slots."""
        found = self.layers.get(layer)
        if found is None or len(found[0]) < self.num_slots:
            # zeros: what is not a number would be one beneath a mask too
            size = self.num_slots
            grown = [new.new_zeros(size, new.shape[1], self.capacity, new.shape[3]) for new in like]
            for new, old in zip(grown, found or (), strict=False):
                new[: len(old)] = old
            self.layers[layer] = found = (grown[0], grown[1])
        return found


def capacity_for(length: int) -> int:
    """Return the size of the smallest slots that hold so many tokens."""
    return max(SMALLEST, power_of_two(length))


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def joined(spans: Sequence[Span], layer: int, lengths: Sequence[int]) -> Pair:
    """Return the first tokens of spans that follow each other, so many of each."""
    if len(spans) == 1:
        keys, values = spans[0].layers[layer]
        return keys[:, :, : lengths[0]], values[:, :, : lengths[0]]
    parts = [span.layers[layer] for span in spans]
    keys, values = (
        torch.cat([pair[n][:, :, :size] for pair, size in zip(parts, lengths, strict=True)], 2)
        for n in (0, 1)
    )
    return keys, values


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
