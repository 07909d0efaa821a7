"""Rows that are made when they are asked for: of a file, a view of others, or packed together.

What is kept of each row is 8 to 24 bytes; see docs/performance.md.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
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
            return View([self], range(len(self))[index])
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


class View(LazyRows):
    """Rows of other sequences, in an order of its own: a slice, a split, several files as one.

    Args:
        parts: The others. places: Of the rows in the parts one after the other; None: all rows.
    """

    def __init__(
        self, parts: Sequence[Sequence[Any]], places: Sequence[int] | Tensor | None = None
    ) -> None:
        self._parts, self._stops = parts, [*accumulate(map(len, parts))]
        self._places = range(self._stops[-1]) if places is None else places

    @cached_property
    def num_tokens(self) -> Tensor:  # type: ignore[override]
        """Tokens of each row (rows,)."""
        known = torch.cat([tokens_of_each(part) for part in self._parts])
        return known[torch.as_tensor(self._places, dtype=torch.int64)]

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Of what the rows teach."""
        told = [part.fingerprint for part in self._parts if isinstance(part, LazyRows)]
        return fingerprint_of(*told, torch.as_tensor(self._places, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return View(self._parts, self._places[index])
        return self.row(range(len(self))[index])

    def row(self, place: int) -> Any:
        at = int(self._places[place])
        part = bisect_right(self._stops, at)
        return self._parts[part][at - (self._stops[part - 1] if part else 0)]

    def values(self, name: str) -> Tensor:
        """Return what a field of one number says of each row."""
        known = [part.values(name) for part in self._parts if isinstance(part, LazyRows)]
        return torch.cat(known)[torch.as_tensor(self._places, dtype=torch.int64)]


def weighted(parts: Sequence[tuple[LazyRows, float]]) -> LazyRows:
    """Return rows of several files as one, each file's as often as its weight says.

    A weight of 2.5 has each row twice, and every second one a third time.
    """
    if [weight for _, weight in parts] == [1.0]:
        return parts[0][0]
    places, start = [], 0
    for rows, weight in parts:
        wanted = max(1, round(weight * len(rows))) if len(rows) else 0
        places.append(start + torch.arange(wanted) * len(rows) // max(wanted, 1))
        start += len(rows)
    return View([rows for rows, _ in parts], torch.cat(places))


class PackedRows(LazyRows):
    """Whole documents together in rows of at most `max_length` tokens; see `packing`."""

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
