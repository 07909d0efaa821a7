"""Rows that are made when they are asked for: of a file, a view of others, or packed together.

The rows of a file are in an Arrow file that is mapped into memory: any number fits. What is kept of
each row is 8 to 24 bytes; see docs/performance.md.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from peftkit.data.columns import KEPT, Columns, open_table, write_table
from peftkit.data.encoding import Block
from peftkit.data.pack import joined, num_tokens, packing, tokens_of_each
from peftkit.errors import DataError

IN_HAND = 1 << 19
"""Tokens of rows that are kept as Python has them: of the next steps, and those just used."""
OBJECT = 64
"""A row itself, in tokens."""
ROWS, FACTS = "rows.arrow", "facts.json"


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


class StoredRows(LazyRows):
    """The rows of a file in a table that is mapped into memory.

    Attributes:
        digests: A number for each row (rows,), equal where rows teach the same.
        num_read: Records of the file, which is rows and dropped ones where each makes one row.
        num_dropped: Of them, without a row.
        counts, agreed, unused: See `encoding.EncodedRows`.
    """

    def __init__(self, where: str, columns: Columns, table: Any, facts: dict[str, Any]) -> None:
        self.where, self._columns, self._table = where, columns, table
        status = _numbers(table.column("status"))
        self._kept = (status == KEPT).nonzero().flatten()
        self._dropped = (status != KEPT).nonzero().flatten()
        self._why = status[self._dropped] - 1
        self.num_dropped = len(self._dropped)
        self.digests = _numbers(table.column("digest"))[self._kept]
        self.num_read: int = facts["num_read"]
        self.counts: dict[str, int] = Counter(facts["counts"])
        self.agreed: dict[str, str] = facts["agreed"]
        self.unused: list[str] = facts["unused"]
        super().__init__(_numbers(table.column("tokens"))[self._kept], self.digests)

    def row(self, place: int) -> Any:
        at = int(self._kept[place])
        return self._columns.row(self._table, at, self._source(at))

    def _source(self, at: int) -> str:
        line = self._table.column("line")[at].as_py()
        return f"{self.where}:{line}" if line >= 0 else self._table.column("source")[at].as_py()

    def dropped(self, why: int) -> Sequence[str]:
        """Return the sources of rows that were dropped for this reason."""
        return [self._source(at) for at in self._dropped[self._why == why].tolist()]

    def values(self, name: str) -> Tensor:
        return torch.cat([_numbers(part) for part in self._columns.chunks(self._table, name)])

    @property
    def is_current(self) -> bool:
        """Whether all files that rows name are as they were."""
        return self._columns.is_current(self._table)

    def held_out(self, share: float) -> tuple[View, View]:
        """Return the rows that are left, and a share of them, by what each row says."""
        held = [is_held_out(digest, share) for part in self.digests.split(1 << 16)
                for digest in part.tolist()]  # fmt: skip
        out = torch.tensor(held, dtype=torch.bool)
        return View([self], (~out).nonzero().flatten()), View([self], out.nonzero().flatten())

    @property
    def num_duplicates(self) -> int:
        """Rows that teach what one before them does."""
        return len(self) - len(self.digests.unique())

    def num_shared(self, other: StoredRows) -> int:
        """Return how many rows others teach too."""
        return int(torch.isin(self.digests, other.digests).sum())


def is_held_out(digest: int, share: float) -> bool:
    """Return whether a row of this digest is held out; equal rows are all or none of them."""
    drawn = hashlib.blake2b(str(digest).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") < share * 2**64


def _numbers(column: Any) -> Tensor:
    return torch.tensor(column.to_numpy())


def write_rows(where: str, folder: Path, columns: Columns, found: Iterator[Block]) -> None:
    """Write blocks, and what was counted, into a folder.

    Raises:
        DataError: There are none.
    """
    agreed: dict[str, str] = {}
    counts: Counter[str] = Counter()
    names: dict[str, None] = {}
    used: set[str] = set()
    num_read = num_rows = 0

    def batches() -> Iterator[Any]:
        nonlocal agreed, num_read, num_rows
        for block in found:
            agreed = agreed or block.agreed
            counts.update(block.counts)
            names.update(dict.fromkeys(block.names))
            used.update(set(block.names) - set(block.unused))
            num_read += block.num_read
            num_rows += len(block.batch)
            yield block.batch

    write_table(folder / ROWS, columns.schema, batches())
    if not num_read:
        raise DataError(f"Cannot use {where}.", found="It holds no rows.")
    facts = {
        "agreed": agreed,
        "counts": dict(counts),
        "unused": [name for name in names if name not in used],
        "num_read": num_read,
        "num_rows": num_rows,
        "num_bytes": (folder / ROWS).stat().st_size,
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def open_rows(where: str, folder: Path, columns: Columns) -> StoredRows:
    """Open what `write_rows` wrote.

    Raises:
        OSError, ValueError, KeyError: It is not there, or harmed.
    """
    facts = json.loads((folder / FACTS).read_bytes())
    if (folder / ROWS).stat().st_size != facts["num_bytes"]:
        raise ValueError("torn")
    table = open_table(folder / ROWS)
    if len(table) != facts["num_rows"] or table.schema != columns.schema:
        raise ValueError("of other columns")
    return StoredRows(where, columns, table, facts)


def fingerprint_of(*told: object) -> str:
    """Return a hash of texts and tensors."""
    digest = hashlib.sha256()
    for one in told:
        digest.update(one.numpy().tobytes() if isinstance(one, Tensor) else str(one).encode())
    return f"sha256:{digest.hexdigest()[:32]}"
