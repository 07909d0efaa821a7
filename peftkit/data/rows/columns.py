"""Encoded rows as Arrow columns, and `StoredRows`, which reads them from a mapped file."""

from __future__ import annotations

import contextlib
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from peftkit.data.pack import IGNORE, Labels
from peftkit.data.records import Dropped
from peftkit.data.rows.lazy import LazyRows, View, num_tokens
from peftkit.errors import DataError

ROWS, FACTS = "rows.arrow", "facts.json"
IS_ROW = 0
"""Status of a row; a dropped record has the number of its reason, counting from 1."""
DAMAGED = (OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError)
"""Errors that reading a damaged Arrow file, or its facts, raises."""


class Columns:
    """The Arrow columns for rows of one dataclass, from its annotations; see `columns_of`.

    Further columns hold the line or source, a status, the number of tokens, and a digest that is
    equal for rows of equal content.

    Attributes:
        schema: Arrow schema.
    """

    def __init__(self, kind: type[Any]) -> None:
        import pyarrow as pa  # brought by datasets; imported when rows are encoded

        hints = get_type_hints(kind, include_extras=True)
        names = [field.name for field in fields(kind) if field.name != "source"]
        types = {name: _arrow_type(hints[name]) for name in names}
        self._kind, self._names = kind, names
        self._labels = [name for name in names if hints[name] == Labels]
        stored = {name: _element(hints[name]) for name in names}
        self._media = {name: type for name, type in stored.items() if hasattr(type, "stored")}
        self._tuples = {name for name in names if get_origin(hints[name]) is tuple}
        self._ints = {name for name, type in types.items() if type == pa.large_list(pa.int32())}
        self._floats = {name for name, type in types.items() if type == pa.large_list(pa.float64())}
        self._fractions = {name for name, type in types.items() if "double" in str(type)}
        facts = {"line": pa.int64(), "source": pa.large_string(), "status": pa.int8()}
        facts |= {"tokens": pa.int32(), "digest": pa.int64()}
        self.schema = pa.schema(facts | {f"row.{name}": type for name, type in types.items()})

    def batch(self, where: str, rows: Iterable[Any], drops: Iterable[str] = ()) -> Any:
        """Return rows and dropped records as an Arrow record batch.

        Args:
            where: The file; the source of a row that is no line of it is stored in full.
            drops: All reasons to drop a record, in the order of their numbers.
        """
        import pyarrow as pa

        columns: dict[str, list[Any]] = {name: [] for name in self.schema.names}
        numbers = {reason: number for number, reason in enumerate(drops, start=1)}
        for row in rows:
            line = row.source.removeprefix(f"{where}:")
            is_line = line.isdecimal()
            columns["line"].append(int(line) if is_line else -1)
            columns["source"].append(None if is_line else row.source)
            values: dict[str, Any] = dict.fromkeys(self._names)
            status, tokens, digest = IS_ROW, 0, 0
            if isinstance(row, Dropped):
                status = numbers[row.reason]
            else:
                values = self._stored(row)
                tokens, digest = num_tokens(row), self.digest(row, values)
            columns["status"].append(status)
            columns["tokens"].append(tokens)
            columns["digest"].append(digest)
            for name, value in values.items():
                columns[f"row.{name}"].append(value)
        arrays = [pa.array(columns[field.name], field.type) for field in self.schema]
        return pa.record_batch(arrays, schema=self.schema)

    def row(self, table: Any, index: int, source: str) -> tuple[Any, int | None]:
        """Return a row of a table and its digest; None if its media have not been read."""
        values: dict[str, Any] = {}
        ints: dict[str, bytes] = {}
        for name in self._names:
            scalar = table.column(f"row.{name}")[index]
            if name in self._media:
                media = tuple(self._media[name].opened(item, source) for item in scalar.values)
                values[name] = media if name in self._tuples else media[0]
            elif name in self._ints or name in self._floats:  # much faster than as_py
                numbers = scalar.values.to_numpy(zero_copy_only=False)
                values[name] = tuple(numbers.tolist())
                ints[name] = numbers.tobytes()
            else:
                values[name] = _with_tuples(scalar.as_py())
        for name in self._labels:
            values[name] = labels_of(values["input_ids"], values[name])
        row = self._kind(**values, source=source)
        items = (item for name in self._media for item in self._media_of(values, name))
        is_read = all(item.is_read for item in items)
        return row, self._digest(row, ints) if is_read else None

    def highest_token(self, batch: Any) -> int:
        """Return the highest token of a record batch; 0 without tokens."""
        names = self._ints.intersection(("input_ids", "labels")).difference(self._labels)
        tokens = (batch.column(f"row.{name}").flatten().to_numpy() for name in names)
        return max((int(column.max(initial=0)) for column in tokens), default=0)

    def values(self, table: Any, name: str) -> Tensor:
        """Return the numbers of a field, with lists concatenated and without dropped records."""
        chunks = []
        for chunk in table.column(f"row.{name}").chunks:
            present = chunk.drop_null()
            chunks.append(_numbers(present.flatten() if present.type.num_fields else present))
        return torch.cat(chunks)

    def is_current(self, table: Any) -> bool:
        """Return whether all media files of the rows are unchanged."""
        for name, kind in self._media.items():
            for chunk in table.column(f"row.{name}").chunks:
                media = chunk.flatten()
                stamps = zip(*(media.field(name).to_pylist() for name in kind.stamp), strict=True)
                if not all(kind.is_unchanged(*stamp) for stamp in stamps):
                    return False
        return True

    def _stored(self, row: object) -> dict[str, Any]:
        """Return a row's values for Arrow; labels become the bounds of their targets."""
        values = {name: getattr(row, name) for name in self._names}
        for name in self._labels:
            values[name] = _bounds(values[name])
        for name in self._media:
            values[name] = [item.stored() for item in self._media_of(values, name)]
        return values

    def _media_of(self, values: Mapping[str, Any], name: str) -> Sequence[Any]:
        return values[name] if name in self._tuples else (values[name],)

    def digest(self, row: Any, stored: Mapping[str, Any] | None = None) -> int:
        """Return 64 bits that are equal for rows of equal content, regardless of their source."""
        stored = self._stored(row) if stored is None else stored
        return self._digest(row, {n: array("i", stored[n]).tobytes() for n in self._ints})

    def _digest(self, row: object, ints: Mapping[str, bytes]) -> int:
        """Return the digest of a row; `ints` are the stored bytes of its integer fields."""
        contents = [
            ints[name]
            if name in self._ints
            else self._text(name, getattr(row, name)).encode("utf-8", "surrogatepass")
            for name in self._names
        ]
        sizes = array("q", map(len, contents)).tobytes()
        digest = hashlib.blake2b(sizes + b"".join(contents), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _text(self, name: str, value: object) -> str:
        """Return a value as text, the same for the value before and after Arrow."""
        return repr(_as_stored(value, float if name in self._fractions else None))


_columns: dict[type[Any], Columns] = {}


def columns_of(kind: type[object]) -> Columns:
    """Return the columns of a class of rows."""
    if kind not in _columns:
        _columns[kind] = Columns(kind)
    return _columns[kind]


def row_digest(row: object) -> int:
    """Return 64 bits that are equal for rows of equal content, regardless of their source."""
    return columns_of(type(row)).digest(row)


def _arrow_type(annotation: Any) -> Any:
    """Return the Arrow type for int, float, bool, str, an optional one, tuples, and media."""
    import pyarrow as pa

    args = get_args(annotation)
    if hasattr(element := _element(annotation), "stored"):
        columns = {name: getattr(pa, type)() for name, type in element.columns.items()}
        return pa.large_list(pa.struct(columns))
    if annotation == Labels or (args[:1] == (int,) and NoneType not in args):
        return pa.large_list(pa.int32())
    if get_origin(annotation) is tuple:
        return pa.large_list(_arrow_type(args[0]))
    scalars = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.large_string()}
    return scalars[args[0] if args else annotation]


def _element(annotation: object) -> Any:
    """Return the class of a field, or of the elements of its tuple."""
    return (get_args(annotation) or (annotation,))[0]


def _with_tuples(value: object) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _as_stored(value: Any, number: type[float] | None) -> Any:
    """Return a value as read back from Arrow: tuples for lists, numbers of the column's type."""
    if isinstance(value, list | tuple):
        return tuple(_as_stored(item, number) for item in value)
    return value if number is None or value is None else number(value)


def labels_of(ids: Sequence[int], bounds: Sequence[int]) -> tuple[int, ...]:
    """Return a row's labels: tokens between the bounds of targets, IGNORE elsewhere."""
    labels = [IGNORE] * len(ids)
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        labels[start:stop] = ids[start:stop]
    return tuple(labels)


def _bounds(labels: Sequence[int]) -> list[int]:
    """Return the bounds of the spans of targets: [3, 7, 12, 15]."""
    bounds: list[int] = []
    is_target = False
    for number, label in enumerate(labels):
        if (label != IGNORE) is not is_target:
            bounds.append(number)
            is_target = not is_target
    return [*bounds, len(labels)] if is_target else bounds


def _numbers(column: Any) -> Tensor:
    return torch.tensor(column.to_numpy())


def feed(digest: Any, batch: Any) -> None:
    """Hash the columns that identify the rows, among them the digest of each row's content."""
    for name in ("line", "status", "tokens", "digest"):
        digest.update(batch.column(name).to_numpy().tobytes())


class StoredRows(LazyRows):
    """The rows of a file, in a memory-mapped table.

    Attributes:
        where: The file.
        digests: Digest of each row (rows,), equal for rows of equal content.
        num_read: Records of the file.
        num_dropped: Records without a row.
        highest_token: Highest token of all rows.
        counts, agreed, shared, unused: See `EncodedRows`.

    Raises:
        DAMAGED: The folder is damaged, or was not written by `encoded`.
    """

    def __init__(self, where: str, folder: Path, kind: type[object]) -> None:
        import pyarrow as pa

        facts = json.loads((folder / FACTS).read_bytes())
        if (folder / ROWS).stat().st_size != facts["num_bytes"]:
            raise ValueError("truncated")
        with pa.memory_map(str(folder / ROWS)) as file:
            table = pa.ipc.open_stream(file).read_all()
        self.where, self._columns, self._table = where, columns_of(kind), table
        self._facts = folder / FACTS
        if len(table) != facts["num_rows"] or table.schema != self._columns.schema:
            raise ValueError("other columns")
        table.validate(full=True)  # reads only the bounds of lists: 8 bytes for each row
        digest = hashlib.sha256()
        for batch in table.to_batches():
            feed(digest, batch)
        if digest.hexdigest() != facts["sha256"]:
            raise ValueError("damaged")
        status = _numbers(table.column("status"))
        self._rows = (status == IS_ROW).nonzero().flatten()
        self._dropped = (status != IS_ROW).nonzero().flatten()
        self._reasons = status[self._dropped]
        self._drops: list[str] = facts["drops"]
        self.num_dropped = len(self._dropped)
        self.digests = _numbers(table.column("digest"))[self._rows]
        self.num_read: int = facts["num_read"]
        self.highest_token: int = facts["highest_token"]
        self.counts: dict[str, int] = Counter(facts["counts"])
        self.agreed: dict[str, str] = facts["agreed"]
        self.shared: dict[str, str] = facts["shared"]
        self.unused: list[str] = facts["unused"]
        super().__init__(_numbers(table.column("tokens"))[self._rows], self.digests)

    def row(self, place: int) -> Any:
        index = int(self._rows[place])
        source = self._source(index)
        try:
            row, digest = self._columns.row(self._table, index, source)
        except Exception as error:  # damaged bytes can raise anything
            raise self._damaged(source) from error
        if digest not in (None, int(self.digests[place])):
            raise self._damaged(source)
        return row

    def _damaged(self, source: str) -> DataError:
        """Return the error for a damaged row, and let the next start encode the file again."""
        with contextlib.suppress(OSError):
            self._facts.unlink(missing_ok=True)
        folder = self._facts.parent
        again = f"Delete {folder} and start" if self._facts.exists() else "Start"
        return DataError(
            f"{source}: its encoded row is damaged.",
            found=f"Its file has changed since it was written: {folder / ROWS}",
            fix=f"{again} again, with --resume if a step was saved: the rows are encoded again. "
            "If this happens often, test the disk and the memory.",
        )

    def values(self, name: str) -> Tensor:
        return self._columns.values(self._table, name)

    def dropped(self, reason: str) -> Sequence[str]:
        """Return the sources of the records that were dropped for a reason."""
        places = self._dropped[self._reasons == 1 + self._drops.index(reason)]
        return [self._source(index) for index in places.tolist()]

    def _source(self, index: int) -> str:
        line = self._table.column("line")[index].as_py()
        return f"{self.where}:{line}" if line >= 0 else self._table.column("source")[index].as_py()

    @property
    def is_current(self) -> bool:
        """Whether all media files of the rows are unchanged."""
        return self._columns.is_current(self._table)

    @property
    def num_duplicates(self) -> int:
        """Number of rows that repeat the content of another row."""
        return len(self) - len(self.digests.unique())

    def num_shared(self, other: StoredRows) -> int:
        """Return how many rows have the content of one of the other rows."""
        return int(torch.isin(self.digests, other.digests).sum())

    def held_out(self, share: float) -> tuple[View, View]:
        """Split off a share of the rows by a hash of their content: (others, held out)."""
        chunks = (chunk.tolist() for chunk in self.digests.split(1 << 16))
        is_out = torch.tensor([is_held_out(digest, share) for chunk in chunks for digest in chunk])
        is_out = is_out.bool()
        return View([self], (~is_out).nonzero().flatten()), View([self], is_out.nonzero().flatten())


def is_held_out(digest: int, share: float) -> bool:
    """Return whether rows with this digest are held out."""
    draw = hashlib.blake2b(str(digest).encode(), digest_size=8).digest()
    return int.from_bytes(draw, "little") < share * 2**64
