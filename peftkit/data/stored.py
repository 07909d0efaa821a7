"""The rows of a file, encoded, in an Arrow file that is mapped into memory: any number fits."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftkit.data.columns import KEPT, Columns, checksum, open_table, write_table
from peftkit.data.encoding import Block
from peftkit.data.lazy_rows import LazyRows, View
from peftkit.errors import DataError

ROWS, FACTS = "rows.arrow", "facts.json"


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


def write_rows(where: str, folder: Path, columns: Columns, found: Iterator[Block]) -> int:
    """Write blocks, and what was counted, into a folder; return the number of records.

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
        "checksum": checksum(folder / ROWS),
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    return num_read


def open_rows(where: str, folder: Path, columns: Columns) -> StoredRows:
    """Open what `write_rows` wrote.

    Raises:
        OSError, ValueError, KeyError: It is not there, or harmed.
    """
    facts = json.loads((folder / FACTS).read_bytes())
    if checksum(folder / ROWS) != facts["checksum"]:
        raise ValueError("harmed")
    table = open_table(folder / ROWS)
    if len(table) != facts["num_rows"] or table.schema != columns.schema:
        raise ValueError("torn")
    return StoredRows(where, columns, table, facts)
