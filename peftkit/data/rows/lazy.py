"""Rows created on demand, views of several files as one sequence, and hashes of rows."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, overload

import torch
from torch import Tensor

RECENT_TOKENS = 1 << 19
"""Tokens of recently used rows that are cached as Python objects."""
OBJECT_TOKENS = 64
"""Memory of a row object without its tokens, in tokens."""


def num_tokens(row: object) -> int:
    """Return a row's length in tokens, encoder plus decoder; 0 if it has none."""
    return sum(row_lengths(row))


def tokens_of_each(rows: Sequence[object]) -> Tensor:
    """Return each row's length in tokens (rows,); lazy rows store it."""
    tokens: Tensor | None = getattr(rows, "num_tokens", None)
    if tokens is not None:
        return tokens
    return torch.tensor([num_tokens(row) for row in rows], dtype=torch.int64)


def row_lengths(row: object) -> tuple[int, int]:
    """Return a row's tokens, or encoder positions, and the tokens of a separate decoder."""
    tokens = len(getattr(row, "input_ids", ())) or getattr(row, "num_encoder_tokens", 0)
    return tokens, getattr(row, "num_decoder_tokens", 0)


class LazyRows(Sequence[Any]):
    """Rows created on demand, with a cache of the rows used last.

    Attributes:
        num_tokens: Length of each row (rows,), int32.
        fingerprint: Hash of the rows' content.
    """

    num_tokens: Tensor
    fingerprint: str

    def __init__(self, num_tokens: Tensor, *contents: object) -> None:
        self.num_tokens = num_tokens
        self.fingerprint = fingerprint_of(*contents)
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self._recent_tokens = 0

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            places = range(len(self))[index]
            return View([self], torch.arange(len(places)) * places.step + places.start)
        place = range(len(self))[index]
        row = self._recent.get(place)
        if row is None:
            row = self._recent[place] = self.row(place)
            self._recent_tokens += OBJECT_TOKENS + num_tokens(row)
            while self._recent_tokens > RECENT_TOKENS and len(self._recent) > 1:
                _, oldest = self._recent.popitem(last=False)
                self._recent_tokens -= OBJECT_TOKENS + num_tokens(oldest)
        return row

    def row(self, place: int) -> Any:
        """Create a row."""
        raise NotImplementedError

    def values(self, name: str) -> Tensor:
        """Return the numbers of a field, for all rows one after the other."""
        raise NotImplementedError


class View(LazyRows):
    """Selected rows of other sequences: a slice, a split, several files as one.

    Args:
        parts: The other sequences.
        places: Indices into the concatenated parts, in the order of the view; None: all rows.
    """

    def __init__(self, parts: Sequence[Sequence[object]], places: Tensor | None = None) -> None:
        self._parts, self._stops = parts, [*accumulate(map(len, parts))]
        self._places = torch.arange(self._stops[-1]) if places is None else places
        contents = [part.fingerprint for part in parts if isinstance(part, LazyRows)]
        tokens = self._selected([tokens_of_each(part) for part in parts])
        super().__init__(tokens, *contents, self._places)

    def row(self, place: int) -> Any:
        index = int(self._places[place])
        part = bisect_right(self._stops, index)
        return self._parts[part][index - (self._stops[part - 1] if part else 0)]

    def values(self, name: str) -> Tensor:
        """Return a field with one number for each row."""
        parts = [part for part in self._parts if isinstance(part, LazyRows)]
        return self._selected([part.values(name) for part in parts])

    def _selected(self, values: list[Tensor]) -> Tensor:
        return (torch.cat(values) if len(values) > 1 else values[0])[self._places]


def weighted(parts: Sequence[tuple[LazyRows, float]]) -> LazyRows:
    """Return the rows of several files as one sequence, repeated by the weight of their file.

    A weight of 2.5 repeats each row twice, and every second row a third time.
    """
    if [weight for _, weight in parts] == [1.0]:
        return parts[0][0]
    places, start = [], 0
    for rows, weight in parts:
        number = max(1, round(weight * len(rows))) if len(rows) else 0
        places.append(start + torch.arange(number) * len(rows) // max(number, 1))
        start += len(rows)
    return View([rows for rows, _ in parts], torch.cat(places))


def fingerprint_of(*contents: object) -> str:
    """Return a hash of texts and tensors."""
    digest = hashlib.sha256()
    for content in contents:
        if isinstance(content, Tensor):
            digest.update(content.numpy().tobytes())
        else:
            digest.update(str(content).encode())
    return f"sha256:{digest.hexdigest()[:32]}"


def fingerprint(rows: Iterable[object]) -> str:
    """Return a hash of the rows' contents, without their `source`."""
    stored = getattr(rows, "fingerprint", None)  # for rows that are not in memory
    if isinstance(stored, str):
        return stored
    digest = hashlib.sha256()
    for row in rows:
        _feed(digest, row)
    return f"sha256:{digest.hexdigest()[:32]}"


def _feed(digest: Any, value: object) -> None:
    """Hash a value with its type and length, which keeps different rows distinct."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        value.pop("source", None)
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        digest.update(b"[%d" % len(value))
        if value and all(type(item) is int for item in value):
            digest.update(array("q", value).tobytes())
            return
        for item in value:
            _feed(digest, item)
        return
    text = repr(value).encode()
    digest.update(b"%d:" % len(text) + text)
