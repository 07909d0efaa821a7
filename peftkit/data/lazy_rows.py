"""Rows that are made when they are asked for: of a table, some of others, or packed together.

What is kept of each row is 8 to 24 bytes; see docs/performance.md.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from peftkit.data.lengths import num_tokens, tokens_of_each
from peftkit.data.pack import joined, packing

IN_HAND = 1 << 19
"""Tokens of rows that are kept as Python has them: of the next steps, and those just used."""
OBJECT = 64
"""A row itself, in tokens."""


class LazyRows(Sequence[Any]):
    """Rows made when they are asked for; the same row is the same object for some time.

    Attributes:
        num_tokens: Of each row (rows,), int32.
        fingerprint: Of what the rows teach.
    """

    num_tokens: Tensor
    fingerprint: str

    def __init__(self, num_tokens: Tensor, *told: object) -> None:
        self.num_tokens = num_tokens
        self.fingerprint = fingerprint_of(*told)
        self._in_hand: OrderedDict[int, Any] = OrderedDict()
        self._tokens_in_hand = 0

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return RowView(self, range(len(self))[index])
        place = range(len(self))[index]
        found = self._in_hand.get(place)
        if found is None:
            found = self._in_hand[place] = self.row(place)
            self._tokens_in_hand += OBJECT + num_tokens(found)
            while self._tokens_in_hand > IN_HAND and len(self._in_hand) > 1:
                _, oldest = self._in_hand.popitem(last=False)
                self._tokens_in_hand -= OBJECT + num_tokens(oldest)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def row(self, place: int) -> Any:
        """Make a row."""
        raise NotImplementedError

    def values(self, name: str) -> Tensor:
        """Return what a field of numbers says, of all rows one after the other."""
        raise NotImplementedError


class RowView(Sequence[Any]):
    """Some rows of others, made when they are asked for."""

    def __init__(self, rows: Sequence[Any], places: Sequence[int]) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return RowView(self._rows, self._places[index])
        return self._rows[self._places[index]]

    @property
    def num_tokens(self) -> Tensor:
        """Tokens of each row."""
        return tokens_of_each(self._rows)[torch.tensor(self._places, dtype=torch.int64)]


class Joined(RowView):
    """Rows of several sequences, one after the other."""

    def __init__(self, *parts: Sequence[Any]) -> None:
        super().__init__((), range(sum(map(len, parts))))
        self._parts = parts

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return RowView(self, self._places[index])
        place = self._places[index]
        for part in self._parts:
            if place < len(part):
                return part[place]
            place -= len(part)
        raise AssertionError

    @property
    def num_tokens(self) -> Tensor:
        """Tokens of each row."""
        return torch.cat([tokens_of_each(part) for part in self._parts])


class Subset(LazyRows):
    """Some of other rows, for good: a split of a file."""

    def __init__(self, rows: LazyRows, places: Tensor) -> None:
        super().__init__(rows.num_tokens[places], rows.fingerprint, places)
        self._rows, self._places = rows, places

    def row(self, place: int) -> Any:
        return self._rows.row(int(self._places[place]))

    def values(self, name: str) -> Tensor:
        """Return what a field of one number says of each row."""
        return self._rows.values(name)[self._places]


class PackedRows(LazyRows):
    """Whole documents together in rows of at most `max_length` tokens; see `pack.pack`."""

    def __init__(self, rows: LazyRows, max_length: int) -> None:
        self.documents = self._rows = rows
        self._members, sizes = packing(rows.num_tokens, max_length)
        self._stops = sizes.cumsum(0)
        stops = torch.cat([torch.zeros(1, dtype=torch.int64), self._stops])
        tokens = rows.num_tokens[self._members].cumsum(0)
        lengths = torch.cat([torch.zeros(1, dtype=torch.int64), tokens])[stops].diff()
        super().__init__(lengths.int(), f"{rows.fingerprint} in rows of {max_length}")

    @property
    def document_lengths(self) -> Tensor:
        """Tokens of each document."""
        return self._rows.num_tokens

    def row(self, place: int) -> Any:
        start, stop = int(self._stops[place - 1]) if place else 0, int(self._stops[place])
        return joined([self._rows.row(member) for member in self._members[start:stop].tolist()])


def fingerprint_of(*told: object) -> str:
    """Return a hash of texts and tensors."""
    digest = hashlib.sha256()
    for one in told:
        digest.update(one.numpy().tobytes() if isinstance(one, Tensor) else str(one).encode())
    return f"sha256:{digest.hexdigest()[:32]}"
