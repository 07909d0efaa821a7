"""The cache of concurrent completions: keys and values, and states of hybrids.

Prompts are computed in chunks, each in a `Span` of exactly its size. A shared prefix stays in its
span, which several completions read. Other spans move into an `Arena`, in whose slots
completions of similar final length grow token by token, without a copy. An arena grows layer by
layer: the number of slots and their length double, up to the need of its completions and the memory
limit. Shared prefixes are computed once (`Prefixes`), and kept within a limit.

Shapes: S slots, K heads of keys, C tokens of a slot, P tokens of a span, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from peftkit.data.tokens import num_common
from peftkit.inference.states import SlotStates, States, copied

Pair = tuple[Tensor, Tensor]
SMALLEST = 512
"""Initial tokens of a slot, if its completion needs as many: growth costs a GPU another capture."""
GRAIN = 32
"""Lengths of slots are multiples of it: masks of GPU attention kernels require this alignment."""
MIN_SHARED = 16
"""Minimum tokens of a shared prefix."""
MIN_SAVED = 128
"""Minimum tokens that sharing saves; the extra forward pass costs about as much."""
MIN_READ = 2048
"""Minimum of tokens times completions for a prefix to be read in place. With fewer, each completion
has a copy, and attention reads all its keys in one product."""


@dataclass(eq=False)
class Span:
    """Keys and values of consecutive tokens of one sequence.

    Attributes:
        tokens: Its tokens, computed or not.
        adapter: The adapter that computes them.
        start: Position of the first token.
        filled: Number of tokens whose keys and values are written.
        layers: Layer to keys and values (1, K, P, D); allocated by the first write.
        states: The states after the last written token.
        base: The span that it continues, without a copy.
        is_read: Whether completions read it in place, instead of copying it.
        num_users: Number of completions that read it.
        used_at: Time of the last use, as a counter.
    """

    tokens: list[int]
    adapter: str | None
    start: int = 0
    filled: int = 0
    layers: dict[int, Pair] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    base: Span | None = None
    is_read: bool = False
    num_users: int = 0
    used_at: int = 0

    @property
    def end(self) -> int:
        """Position after the last written token."""
        return self.start + self.filled

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.filled

    @property
    def is_ready(self) -> bool:
        return self.filled == len(self.tokens)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append (1, K, T, D); the caller raises `filled` after the last layer."""
        if layer not in self.layers:
            self.layers[layer] = (self._like(keys), self._like(values))
        size = keys.shape[2]
        for cache, new in zip(self.layers[layer], (keys, values), strict=True):
            cache[:, :, self.filled : self.filled + size] = new

    def _like(self, new: Tensor) -> Tensor:
        return new.new_empty(1, new.shape[1], len(self.tokens), new.shape[3])

    def copy_from(self, other: Span) -> None:
        """Copy the tokens of another span with the same start."""
        for layer, (keys, values) in other.layers.items():
            self.write(layer, keys[:, :, : other.filled], values[:, :, : other.filled])
        self.states = copied(other.states)
        self.filled = other.filled


@dataclass(eq=False)
class Row:
    """A completion that grows in an arena.

    Attributes:
        owner: The `engine.Completion`.
        base: The shared prefix that it reads in place, if any.
        length: Number of its tokens in the arena, after the prefix.
        slot: Index of its slot.
    """

    owner: Any
    base: Span | None
    length: int
    arena: Arena | None = None
    slot: int = 0

    @property
    def start(self) -> int:
        """Position of its first token in the arena."""
        return 0 if self.base is None else self.base.end

    @property
    def final_length(self) -> int:
        """Length of the slot that it needs at its end."""
        return slot_length(self.owner.num_tokens - self.start)

    def as_span(self) -> Span:
        """Return its tokens with a copy of their keys and values; the slot can be freed."""
        assert self.arena is not None
        tokens = [*self.owner.tokens, self.owner.end][self.start : self.start + self.length]
        at = slice(self.slot, self.slot + 1)
        layers = {
            layer: (keys[at, :, : self.length].clone(), values[at, :, : self.length].clone())
            for layer, (keys, values) in self.arena.layers.items()
        }
        adapter = self.owner.request.adapter
        states = self.arena.states.of(self.slot)
        return Span(tokens, adapter, self.start, self.length, layers, states, self.base)

    @property
    def has_room(self) -> bool:
        """Whether its slot has room for the next token."""
        return self.arena is not None and self.length < self.arena.capacity

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Return the index in its slot for the next token, `start`, and that token."""
        owner = self.owner
        return self.length, self.start, (owner.ids or owner.request.ids)[-1]


class Arena:
    """Slots of one length; its rows fill the first ones, in the order of `rows`.

    Attributes:
        num_slots, capacity: S and C.
        num_changes: Number of changes of its rows and slots.
        layers: Layer to keys and values (S, K, C, D).
        states: The states of its rows.
    """

    def __init__(self) -> None:
        self.num_slots, self.capacity, self.num_changes = 0, 0, 0
        self.rows: list[Row] = []
        self.layers: dict[int, Pair] = {}
        self.states = SlotStates()

    @property
    def is_full(self) -> bool:
        """Whether all slots are used."""
        return len(self.rows) == self.num_slots

    def resize(self, num_slots: int, capacity: int) -> None:
        """Change the number and length of slots; at most one layer exists twice at a time."""
        self.num_slots, self.capacity = num_slots, capacity
        self.num_changes += 1
        for layer in self.layers:
            keys, values = self.layers[layer]
            self.layers[layer] = self._resized(keys), self._resized(values)
        self.states.resize(num_slots, len(self.rows))

    def _resized(self, old: Tensor) -> Tensor:
        # zeros: NaN in unused slots would survive the mask
        new = old.new_zeros(self.num_slots, old.shape[1], self.capacity, old.shape[3])
        slots, length = len(self.rows), min(self.capacity, old.shape[2])
        new[:slots, :, :length] = old[:slots, :, :length]
        return new

    def add(self, row: Row, span: Span) -> None:
        """Assign the next slot to a row, and copy the tokens and states of its span."""
        row.arena, row.slot = self, len(self.rows)
        self.num_changes += 1
        self.states.put(row.slot, span.states)
        for layer, pair in span.layers.items():
            for cache, new in zip(self._tensors(layer, pair), pair, strict=True):
                cache[row.slot, :, : row.length] = new[0, :, : row.length]
        self.rows.append(row)

    def remove(self, row: Row) -> None:
        """Free a row's slot: the last row moves into it."""
        last = self.rows.pop()
        self.num_changes += 1
        if last is row:
            return
        for pair in self.layers.values():
            for cache in pair:
                cache[row.slot, :, : last.length] = cache[last.slot, :, : last.length]
        self.states.move(last.slot, row.slot)
        self.rows[row.slot], last.slot = last, row.slot

    def write(self, layer: int, index: Pair, keys: Tensor, values: Tensor) -> Pair:
        """Write one token into each of the first slots; return the layer's keys and values.

        Args:
            index: Slot of each row, and index within the slot.
            keys, values: (b, K, 1, D).
        """
        pair = self._tensors(layer, (keys, values))
        for cache, new in zip(pair, (keys, values), strict=True):
            cache[index[0], :, index[1]] = new[:, :, 0]
        return pair

    def _tensors(self, layer: int, like: Pair) -> Pair:
        """Return a layer's keys and values, allocated by the first call."""
        if layer not in self.layers:
            size, length = self.num_slots, self.capacity
            keys, values = (new.new_zeros(size, new.shape[1], length, new.shape[3]) for new in like)
            self.layers[layer] = keys, values
        return self.layers[layer]


def slot_length(tokens: int) -> int:
    """Return the length of a slot for this many tokens."""
    return -(-tokens // GRAIN) * GRAIN


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def joined(spans: Sequence[Span], layer: int, lengths: Sequence[int]) -> Pair:
    """Return the first `lengths` tokens of consecutive spans, concatenated."""
    if len(spans) == 1:
        keys, values = spans[0].layers[layer]
        return keys[:, :, : lengths[0]], values[:, :, : lengths[0]]
    parts = [span.layers[layer] for span in spans]
    keys, values = (
        torch.cat([pair[n][:, :, :size] for pair, size in zip(parts, lengths, strict=True)], 2)
        for n in (0, 1)
    )
    return keys, values


def worth_sharing(tokens: Sequence[int], others: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Return the length of the prefix to share, and the number of other users; zeros: none."""
    common = sorted((num_common(tokens, other) for other in others), reverse=True)
    saved, size, users = max(
        ((length * number, length, number) for number, length in enumerate(common, 1)),
        default=(0, 0, 0),
    )
    return (size, users) if size >= MIN_SHARED and saved >= MIN_SAVED else (0, 0)


class Prefixes:
    """Shared prefixes: spans that begin at position 0.

    Args:
        max_tokens: Maximum tokens of unused prefixes to keep; the least recently used are dropped.
        state_tokens: Tokens that need as much memory as the states of a row.
    """

    def __init__(self, max_tokens: int, state_tokens: int = 0) -> None:
        self._spans: list[Span] = []
        self._max_tokens, self._state_tokens = max_tokens, state_tokens
        self._clock = count(1)

    def __contains__(self, span: Span) -> bool:
        return span in self._spans

    @property
    def num_tokens(self) -> int:
        return self._size_of(self._spans)

    def _size_of(self, spans: Iterable[Span]) -> int:
        return sum(len(span.tokens) + self._state_tokens for span in spans)

    def add(self, span: Span) -> None:
        """Add a span, computed or not."""
        self._spans.append(span)
        self.touch(span)

    def find(self, tokens: list[int], adapter: str | None) -> Span | None:
        """Return the longest shared prefix of these tokens."""
        matching = [
            span
            for span in self._spans
            if span.adapter == adapter and tokens[: len(span.tokens)] == span.tokens
        ]
        return max(matching, key=lambda span: len(span.tokens), default=None)

    def touch(self, span: Span) -> None:
        span.used_at = next(self._clock)

    def trim(self, waiting: Iterable[Sequence[int]]) -> None:
        """Drop prefixes beyond `max_tokens` that neither completions nor queued prompts use."""
        idle = [span for span in self._spans if not span.num_users and span.is_ready]
        spare = self._size_of(idle) - self._max_tokens
        if spare <= 0:
            return
        prompts = [list(tokens) for tokens in waiting]
        for span in sorted(idle, key=lambda span: span.used_at):
            size = len(span.tokens)
            if spare > 0 and not any(tokens[:size] == span.tokens for tokens in prompts):
                self._spans.remove(span)
                spare -= size + self._state_tokens

    def drop(self) -> None:
        """Drop all unused prefixes."""
        self._spans = [span for span in self._spans if span.num_users or not span.is_ready]

    def forget(self, adapter: str) -> None:
        """Drop an adapter's prefixes, which must be unused."""
        self._spans = [span for span in self._spans if span.adapter != adapter]
