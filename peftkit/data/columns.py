"""Rows as columns of an Arrow file, and back; what a row's annotations say is all there is to know.

| annotation                               | column                                        |
| tuple[int, ...], tuple[int, int]         | a list of int32                               |
| Learnt                                   | where learnt tokens begin and end: [3, 7]     |
| tuple[tuple[int, int], ...]              | a list of pairs of int32                      |
| tuple[float, ...]                        | a list of float64                             |
| int, float, bool, str, or one of them or None | int64, float64, bool, text               |
| tuple[str, ...]                          | a list of texts                               |
| Picture, Sound, tuple[Media, ...]        | a path, or bytes; see `Media.stored`          |

Beside these each row has its `line`, its `tokens`, a `digest` that is equal for rows that teach the
same, and a `status`: KEPT, or why its record became no row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from peftkit.data.images import Picture
from peftkit.data.media import STAMP, STORED, Media, is_as_stored
from peftkit.data.media_row import KINDS
from peftkit.data.pack import IGNORE, Learnt, num_tokens
from peftkit.data.sounds import Sound

KEPT = 0
"""Status of a row that is learnt; a dropped one has the number of its reason, from 1 on."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A record that became no row; `why` is the number of its encoder's reason, from 0 on."""

    source: str
    why: int


@dataclass(frozen=True, slots=True)
class Column:
    """How values of one annotation are kept.

    Attributes:
        type: Arrow's name of the column's type. stored: Makes of a value what Arrow takes.
        value: Makes a value of Arrow's scalar and the row's source.
    """

    type: str
    stored: Callable[[Any], Any]
    value: Callable[[Any, str], Any]


def _same(value: Any) -> Any:
    return value


def _plain(scalar: Any, source: str) -> Any:
    return scalar.as_py()


def _numbers(scalar: Any, source: str) -> tuple[Any, ...]:
    return tuple(scalar.values.to_numpy(zero_copy_only=False).tolist())


def _pairs(scalar: Any, source: str) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, scalar.as_py()))


def _bounds(labels: Sequence[int]) -> list[int]:
    """Return where learnt tokens begin and end: [3, 7, 12, 15]."""
    found: list[int] = []
    learns = False
    for number, label in enumerate(labels):
        if (label != IGNORE) is not learns:
            found.append(number)
            learns = not learns
    return [*found, len(labels)] if learns else found


def labels_of(ids: Sequence[int], bounds: Sequence[int]) -> tuple[int, ...]:
    """Return a row's labels: its tokens where they are learnt, IGNORE elsewhere."""
    labels = [IGNORE] * len(ids)
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        labels[start:stop] = ids[start:stop]
    return tuple(labels)


def _media(scalar: Any, source: str) -> tuple[Media, ...]:
    return tuple(_KINDS[one["kind"].as_py()].opened(one, source) for one in scalar.values)


def _medium(scalar: Any, source: str) -> Media:
    (found,) = _media(scalar, source)
    return found


_KINDS = {kind.kind: kind for kind in KINDS}
_MEDIUM = Column("media", lambda one: [one.stored()], _medium)
_INTS = Column("ints", _same, _numbers)
_LEARNT = Column("ints", _bounds, _numbers)
COLUMNS: dict[Any, Column] = {
    tuple[int, ...]: _INTS,
    tuple[int, int]: _INTS,
    Learnt: _LEARNT,
    tuple[tuple[int, int], ...]: Column("pairs", _same, _pairs),
    tuple[float, ...]: Column("floats", _same, _numbers),
    int: Column("int", _same, _plain),
    float: Column("float", _same, _plain),
    float | None: Column("float", _same, _plain),
    bool: Column("bool", _same, _plain),
    bool | None: Column("bool", _same, _plain),
    str: Column("text", _same, _plain),
    str | None: Column("text", _same, _plain),
    tuple[str, ...]: Column("texts", list, lambda scalar, source: tuple(scalar.as_py())),
    Picture: _MEDIUM,
    Sound: _MEDIUM,
    tuple[Media, ...]: Column("media", lambda some: [one.stored() for one in some], _media),
}


class Columns:
    """The columns of rows of one class, a dataclass with a `source`.

    Attributes:
        schema: Arrow's.
    """

    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self._kind = kind
        names = [field.name for field in fields(kind) if field.name != "source"]
        self._columns = {name: COLUMNS[hints[name]] for name in names}

    @property
    def schema(self) -> Any:
        import pyarrow as pa

        own = {"line": pa.int64(), "source": pa.large_string(), "status": pa.int8()}
        own |= {"tokens": pa.int32(), "digest": pa.int64()}
        types = _types()
        return pa.schema(own | {f"row.{n}": types[c.type] for n, c in self._columns.items()})

    def batch(self, where: str, made: Iterable[Any]) -> Any:
        """Return rows, and records that became none, as a batch of Arrow.

        Args:
            where: The file; where a row's source is no line of it, it is kept in full.
        """
        import pyarrow as pa

        schema = self.schema
        columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        for row in made:
            line = row.source.removeprefix(f"{where}:")
            is_line = line.isdecimal()
            columns["line"].append(int(line) if is_line else -1)
            columns["source"].append(None if is_line else row.source)
            if isinstance(row, Dropped):
                values: dict[str, Any] = dict.fromkeys(self._columns)
                own = (1 + row.why, 0, 0)
            else:
                values = {n: c.stored(getattr(row, n)) for n, c in self._columns.items()}
                own = (KEPT, num_tokens(row), self._digest(row, values))
            for name, value in zip(("status", "tokens", "digest"), own, strict=True):
                columns[name].append(value)
            for name, value in values.items():
                columns[f"row.{name}"].append(value)
        arrays = [pa.array(columns[field.name], field.type) for field in schema]
        return pa.record_batch(arrays, schema=schema)

    def row(self, table: Any, at: int, source: str) -> Any:
        """Return a row of a table."""
        values = {
            name: column.value(table.column(f"row.{name}")[at], source)
            for name, column in self._columns.items()
        }
        for name, column in self._columns.items():
            if column is _LEARNT:
                values[name] = labels_of(values["input_ids"], values[name])
        return self._kind(**values, source=source)

    def chunks(self, table: Any, name: str) -> Iterator[Any]:
        """Yield the numbers of a field, lists one after the other; dropped rows have none."""
        for chunk in table.column(f"row.{name}").chunks:
            known = chunk.drop_null()
            yield known.flatten() if hasattr(known, "flatten") and known.type.num_fields else known

    def is_current(self, table: Any) -> bool:
        """Tell whether all files that rows name are as they were."""
        names = [f"row.{name}" for name, c in self._columns.items() if c.type == "media"]
        return all(
            is_as_stored(one)
            for name in names
            for chunk in table.column(name).chunks
            for one in _stamps(chunk)
        )

    def digest(self, row: Any) -> int:
        """Return 64 bits that are equal for rows that teach the same, wherever they come from."""
        return self._digest(row, {n: c.stored(getattr(row, n)) for n, c in self._columns.items()})

    def _digest(self, row: Any, values: dict[str, Any]) -> int:
        told = [
            array("i", values[name]).tobytes()
            if column.type == "ints"
            else repr(getattr(row, name)).encode("utf-8", "surrogatepass")
            for name, column in self._columns.items()
        ]
        sizes = array("q", map(len, told)).tobytes()
        digest = hashlib.blake2b(sizes + b"".join(told), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def columns_of(kind: type[Any]) -> Columns:
    """Return the columns of a class of rows."""
    if kind not in _known:
        _known[kind] = Columns(kind)
    return _known[kind]


_known: dict[type[Any], Columns] = {}


@lru_cache
def _types() -> dict[str, Any]:
    import pyarrow as pa  # brought by datasets; imported when rows are encoded

    return {
        "ints": pa.large_list(pa.int32()),
        "pairs": pa.large_list(pa.list_(pa.int32(), 2)),
        "floats": pa.large_list(pa.float64()),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "text": pa.large_string(),
        "texts": pa.large_list(pa.large_string()),
        "media": pa.large_list(
            pa.struct({name: getattr(pa, kind)() for name, kind in STORED.items()})
        ),
    }


def _stamps(pictures: Any) -> list[dict[str, Any]]:
    """Return the stamps of a column's pictures, without their bytes."""
    import pyarrow as pa

    flat = pictures.flatten()
    columns = [flat.field(name) for name in STAMP]
    found: list[dict[str, Any]] = pa.StructArray.from_arrays(columns, names=STAMP).to_pylist()
    return found


def write_table(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    """Write batches one after the other."""
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def open_table(path: Path) -> Any:
    """Map a file into memory; its pages are read when they are asked for."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()
