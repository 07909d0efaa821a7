"""Rows of several files as one, each file's as often as its weight says; rows held out."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, overload

from peftkit.data.lengths import tokens_of_each


def is_held_out(text: str, share: float) -> bool:
    """Return whether a row that says this is held out; equal rows are all or none of them."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


class Mixture(Sequence[Any]):
    """Rows of several files, one after the other.

    A weight of 2.5 has each row twice, and every second one a third time.

    Attributes:
        num_tokens: Of each row.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[Any], float]]) -> None:
        self._parts = [rows for rows, _ in parts]
        self._part, self._place = array("i"), array("q")
        for number, (rows, weight) in enumerate(parts):
            wanted = max(1, round(weight * len(rows))) if len(rows) else 0
            places = [n * len(rows) // wanted for n in range(wanted)]
            self._part.extend(array("i", [number]) * len(places))
            self._place.extend(places)
        lengths = [tokens_of_each(rows) for rows in self._parts]
        pairs = zip(self._part, self._place, strict=True)
        self.num_tokens = array("i", (lengths[part][place] for part, place in pairs))

    def __len__(self) -> int:
        return len(self._part)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        return self._parts[self._part[index]][self._place[index]]

    @property
    def fingerprint(self) -> str | None:
        """Of what the rows teach, if the files' rows know it without a look at each."""
        known = [getattr(rows, "fingerprint", None) for rows in self._parts]
        if not all(isinstance(one, str) for one in known):
            return None
        told = repr(known).encode() + self._part.tobytes() + self._place.tobytes()
        return f"sha256:{hashlib.sha256(told).hexdigest()[:32]}"
