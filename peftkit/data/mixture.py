"""Rows of several files as one, each file's as often as its weight says; rows held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from peftkit.data.lazy_rows import LazyRows


def is_held_out(digest: int, share: float) -> bool:
    """Return whether a row of this digest is held out; equal rows are all or none of them."""
    drawn = hashlib.blake2b(str(digest).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") < share * 2**64


class Mixture(LazyRows):
    """Rows of several files, one after the other.

    A weight of 2.5 has each row twice, and every second one a third time.
    """

    def __init__(self, parts: Sequence[tuple[LazyRows, float]]) -> None:
        self._parts = [rows for rows, _ in parts]
        places = []
        for rows, weight in parts:
            wanted = max(1, round(weight * len(rows))) if len(rows) else 0
            places.append(torch.arange(wanted) * len(rows) // max(wanted, 1))
        self._stops = torch.tensor([len(some) for some in places]).cumsum(0)
        lengths = [rows.num_tokens[some] for rows, some in zip(self._parts, places, strict=True)]
        self._places = torch.cat(places)
        told = [rows.fingerprint for rows in self._parts]
        super().__init__(torch.cat(lengths), *told, self._stops, self._places)

    def row(self, place: int) -> Any:
        part = int(torch.searchsorted(self._stops, place, right=True))
        return self._parts[part].row(int(self._places[place]))
