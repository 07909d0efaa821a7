"""Encoded rows: encoded once from a file's records, stored as Arrow, mapped into memory.

    records (load) -> examples (format) -> rows (encode) -> Arrow columns -> StoredRows
        -> View, PackedRows, batches (pack)

`encoded` returns the rows of a file. They are stored in the cache of Hugging Face datasets, in a
folder named by a hash of everything they depend on: the bytes of the file, the tokenizer, the
template, the settings, and the encoding code. So a second start encodes nothing. The folder is
renamed once it is complete. If several processes need the same rows, one encodes and the others
wait. Any number of rows fits: 8 to 24 bytes of each are in memory (docs/performance.md).

Arrow is used directly. `datasets.map` with the same encoder is not faster (20,000 conversations:
7.3 s against 7.1 s in one process, 4.4 s against 3.5 s in two) and takes five times the disk (76 MB
against 16 MB), because records must be copied into a data set first. Its fingerprint of an encoder
does not see the code of imported modules, and changes when the encoder caches something; it takes
no lock. It would replace the pool and the file, not the columns, counts and errors.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from peftkit.data import load
from peftkit.data.load import Part, Record
from peftkit.data.pack import IGNORE, Labels, LazyRows, View, num_tokens
from peftkit.errors import DataError, RunError
from peftkit.events import Listener, Notice, Progress, ignore
from peftkit.files.disk import alone

ROWS, FACTS = "rows.arrow", "facts.json"
KEPT = 0
"""Status of a row; a dropped record has the number of its reason, from 1 on."""
POOL_PARTS = 16
"""A file of at least so many parts is worth starting processes for."""
MAX_PROCESSES = 16
REREAD_BYTES = 256 << 20
"""A larger file with invalid rows is not read again to count them all."""
ENCODING_PACKAGES = ("transformers", "tokenizers")
DAMAGED = (OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError)
"""What reading a damaged file of Arrow, or its facts, raises."""

# ------------------------------------------------------------------- defined by a task


@dataclass(frozen=True, slots=True)
class Dropped:
    """A record that became no row; `why` is the number of its encoder's reason, from 0 on."""

    source: str
    why: int


@dataclass(slots=True)
class EncodedRows:
    """The rows of some records.

    Attributes:
        rows: In the order of the records: rows, and `Dropped` for records that became none.
        agreed: Values that all rows of a file must share, by name: their format.
        shared: Values that are kept if all rows of a file share them, by name: a system prompt.
        counts: Added up over the file, by name.
        unused: Fields that none of the records used.
    """

    rows: list[Any]
    agreed: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()
    shared: dict[str, str] = field(default_factory=dict)


class RowEncoder(ABC):
    """Encoder of records as a task's rows; needs no model.

    Attributes:
        kind: The rows' dataclass, with a `source`.
        in_processes: Whether several processes may encode a file.
        at_once: Records that are encoded between two reports of progress.
        drops: Why a record becomes no row, and what to do about it; `Dropped.why` is an index.
    """

    kind: ClassVar[type[Any]]
    in_processes: ClassVar[bool] = True
    at_once: ClassVar[int] = 1_000
    drops: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def key(self, where: str) -> object:
        """Return everything that rows depend on, except the bytes of their file and the code."""

    @abstractmethod
    def read(self, records: Sequence[Record], where: str) -> Any:
        """Parse records, without tokens.

        Raises:
            DataError: Names the first few records that cannot be used.
        """

    @abstractmethod
    def rows(self, read: Any) -> EncodedRows:
        """Encode what `read` returned."""

    def parts(self, where: str) -> Iterator[Part]:
        """Yield functions that read some records each, in the order of the file."""
        return load.parts(where)

    def stamp(self, where: str) -> object | None:
        """Return a value that changes with rows that are not a file; None: unknown."""
        return load.stamp_of(where)


def tokenizer_key(tokenizer: Any) -> tuple[object, ...]:
    """Return everything that the tokens of a text depend on, for `RowEncoder.key`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        for name in ("truncation", "padding"):  # left there by the last call
            settings.pop(name, None)
    return (
        type(tokenizer).__name__,
        hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
        sorted(tokenizer.special_tokens_map.items()),
        tokenizer.chat_template,
        getattr(tokenizer, "init_kwargs", {}).get("add_bos_token"),
    )


# ------------------------------------------------------------------- the cache


def encoded(
    where: str,
    encoder: RowEncoder,
    *,
    on_event: Listener = ignore,
    processes: int | None = None,
) -> StoredRows:
    """Return the rows of a file or data set, encoded now or before.

    Args:
        processes: Encode in so many; by default in one per core for a large file, else in one.

    Raises:
        DataError: Rows cannot be read or used; names them.
        RunError: The disk has no room for them, or a process was killed.
    """
    name, num_lines = _cache_name(where, encoder)
    try:
        if name is None:  # content unknown: mapped, and deleted with the process
            return _encode(where, None, num_lines, encoder, on_event, processes)
        folder = cache_folder() / name
        if (rows := _cached(where, folder, encoder)) is not None:
            return rows
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = Notice(f"Another process encodes {where}; waiting for it.")
        with alone(folder, lambda: on_event(waiting)):
            if (rows := _cached(where, folder, encoder)) is not None:
                return rows  # that process encoded them
            return _encode(where, folder, num_lines, encoder, on_event, processes)
    except OSError as problem:
        raise RunError(
            f"cannot store the encoded rows of {where}",
            found=f"{problem}; they go to {cache_folder()}.",
            fix="Make room there, or set HF_HOME to a folder on a larger disk.",
        ) from problem


def cache_folder() -> Path:
    """Return the folder of encoded rows, next to the data sets of Hugging Face."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets") / "peftkit"


def _cache_name(where: str, encoder: RowEncoder) -> tuple[str | None, int]:
    """Return a hash of all that encoded rows depend on, None: unknown; and the number of lines.

    Raises:
        DataError: The file cannot be read.
    """
    digest, num_lines = hashlib.sha256(), 0
    path = Path(where).expanduser()
    if path.is_file():
        try:
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    num_lines += chunk.count(b"\n")
        except OSError as problem:
            raise DataError(f"Cannot read {where}.", found=str(problem)) from None
    elif (stamp := encoder.stamp(where)) is not None:
        digest.update(repr(stamp).encode())
    else:
        return None, 0
    code = _code_hash(type(encoder).__module__)
    settings = (path.suffix.lower(), type(encoder).__qualname__, code, encoder.key(where))
    digest.update(repr(settings).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:40], num_lines if load.is_read_by_lines(path) else 0


@cache
def _code_hash(module: str) -> str:
    """Return a hash of the code that encodes: this package, and the encoder's own."""
    digest = hashlib.sha256()
    folders = {Path(__file__).parent, Path(str(sys.modules[module].__file__)).parent}
    for folder in sorted(folders):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest() + "".join(version(name) for name in ENCODING_PACKAGES)


def _cached(where: str, folder: Path, encoder: RowEncoder) -> StoredRows | None:
    """Open the rows of a folder; None if they are missing, damaged, or name changed files."""
    try:
        rows = StoredRows(where, folder, encoder.kind)
    except DAMAGED:
        return None
    return rows if rows.is_current else None


def _encode(
    where: str,
    folder: Path | None,
    num_lines: int,
    encoder: RowEncoder,
    on_event: Listener,
    processes: int | None,
) -> StoredRows:
    """Encode into a temporary folder; rename it once it is complete."""
    parent = cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    prefix = "making-" if folder is None else f"making-{folder.name}-"
    for stale in parent.glob(f"{prefix}*") if folder is not None else ():
        shutil.rmtree(stale, ignore_errors=True)  # of a process that was killed
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        _write(temporary, where, encoder, num_lines, on_event, processes)
        if folder is None:
            return StoredRows(where, temporary, encoder.kind)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or naming changed files
        temporary.rename(folder)
        return StoredRows(where, folder, encoder.kind)
    except DataError:
        _check_whole_file(where, encoder)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_whole_file(where: str, encoder: RowEncoder) -> None:
    """Raise the error that counts the wrong rows of the whole file, not of one block."""
    path = Path(where).expanduser()
    if not path.is_file() or path.stat().st_size <= REREAD_BYTES:
        records = [record for part in encoder.parts(where) for record in part()]
        if records:
            encoder.read(records, where)


def _write(
    folder: Path,
    where: str,
    encoder: RowEncoder,
    num_lines: int,
    on_event: Listener,
    processes: int | None,
) -> None:
    """Encode rows into a folder, with the facts that are added up over them.

    Raises:
        DataError: There are no rows, or two of them differ in what all must have in common.
    """
    import pyarrow as pa

    agreed: dict[str, str] = {}
    shared: dict[str, str] | None = None
    counts: Counter[str] = Counter()
    is_used: dict[str, bool] = {}
    num_read = num_rows = 0
    digest = hashlib.sha256()
    with (
        pa.OSFile(str(folder / ROWS), "wb") as file,
        pa.ipc.new_stream(file, columns_of(encoder.kind).schema) as writer,
    ):
        for block in blocks(where, encoder, processes):
            agreed = agreed or block.agreed
            _check_agreed(agreed, block, where)
            shared = dict(
                block.shared.items() & (block.shared if shared is None else shared).items()
            )
            counts.update(block.counts)
            for name, used in block.fields.items():
                is_used[name] = used or is_used.get(name, False)
            num_read += block.num_read
            num_rows += len(block.batch)
            writer.write_batch(block.batch)
            _feed(digest, block.batch)
            done = int(block.last.rpartition(":")[2]) if num_lines else num_read
            on_event(Progress(f"Encoding {where}", done, max(done, num_lines)))
    if not num_read:
        raise DataError(f"Cannot use {where}.", found="It holds no rows.")
    facts = {
        "agreed": agreed,
        "shared": shared,
        "counts": dict(counts),
        "unused": [name for name, used in is_used.items() if not used],
        "num_read": num_read,
        "num_rows": num_rows,
        "num_bytes": (folder / ROWS).stat().st_size,
        "sha256": digest.hexdigest(),
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _feed(digest: Any, batch: Any) -> None:
    """Hash the columns that say which rows there are; each row has a digest of its content."""
    for name in ("line", "status", "tokens", "digest"):
        digest.update(batch.column(name).to_numpy().tobytes())


def _check_agreed(agreed: Mapping[str, str], block: Block, where: str) -> None:
    for name, value in block.agreed.items():
        if value != (first := agreed.get(name)):
            raise DataError(
                f"Cannot use {where}.",
                found=f"{block.first} has the {name} '{value}', the first row the {name} "
                f"'{first}'.",
                fix="Give rows of one kind, or set data.format.",
            )


# ------------------------------------------------------------------- encoding, in processes


@dataclass(slots=True)
class Block:
    """Some encoded rows of a file, as they come from the process that encoded them.

    Attributes:
        batch: Arrow's.
        num_read: Records.
        first, last: Sources of the first and the last record.
        fields: Of the records, and whether one of these needed it.
        agreed, shared, counts: See `EncodedRows`.
    """

    batch: Any
    num_read: int
    first: str
    last: str
    fields: dict[str, bool]
    agreed: dict[str, str]
    shared: dict[str, str]
    counts: Counter[str]


def blocks(where: str, encoder: RowEncoder, processes: int | None = None) -> Iterator[Block]:
    """Yield the rows of a file or data set in their order; few blocks are in memory.

    Raises:
        DataError: Rows cannot be read or used; names the first of them.
        RunError: A process was killed.
    """
    parts = encoder.parts(where)
    first = list(islice(parts, POOL_PARTS))
    if processes is None:
        # without fork, a process would have to import all of this first
        can_fork = sys.platform not in ("win32", "darwin")
        is_large = len(first) == POOL_PARTS
        processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES) if is_large and can_fork else 1
    if processes > 1 and encoder.in_processes:
        yield from _in_processes(chain(first, parts), where, encoder, processes)
        return
    for part in chain(first, parts):
        yield from _part_blocks(part, where, encoder)


def _in_processes(
    parts: Iterable[Part], where: str, encoder: RowEncoder, processes: int
) -> Iterator[Block]:
    """Encode parts in processes, few of them ahead of the reader."""
    columns_of(encoder.kind)  # imports pyarrow, once for all processes
    context = multiprocessing.get_context("fork")
    known = where, encoder, os.getpid()
    pool = ProcessPoolExecutor(processes, context, _start_worker, known)
    pending: deque[Future[list[Block]]] = deque()
    try:
        for part in parts:
            with warnings.catch_warnings():  # of forks with threads: no child uses those
                warnings.simplefilter("ignore", DeprecationWarning)
                pending.append(pool.submit(_work, part))
            if len(pending) > 2 * processes:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool:
        raise RunError(
            f"cannot encode {where}",
            found="A process that encoded its rows was killed; memory may have run out.",
            fix="Start again; with fewer other programs, or cores (taskset), it needs less memory.",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_job: tuple[str, RowEncoder] | None = None
"""The file and the encoder of a worker process: inherited by the fork, not pickled."""


def _start_worker(where: str, encoder: RowEncoder, parent: int) -> None:
    global _job
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    gc.freeze()  # a collection would write to all pages that are shared with the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)  # as in the workers of a DataLoader: a fork has no other threads
    _job = where, encoder


def _end_with(parent: int) -> None:
    """End this process with the one that started it: it has that one's memory, and its port."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(part: Part) -> list[Block]:
    assert _job is not None
    return list(_part_blocks(part, *_job))


def _part_blocks(part: Part, where: str, encoder: RowEncoder) -> Iterator[Block]:
    records = part()
    for start in range(0, len(records), encoder.at_once):
        chunk = records[start : start + encoder.at_once]
        rows = encoder.rows(encoder.read(chunk, where))
        unused = {*rows.unused}
        yield Block(
            batch=columns_of(encoder.kind).batch(where, rows.rows),
            num_read=len(chunk),
            first=chunk[0].source,
            last=chunk[-1].source,
            fields={name: name not in unused for record in chunk for name in record.fields},
            agreed=rows.agreed,
            shared=rows.shared,
            counts=rows.counts,
        )


# ------------------------------------------------------------------- rows as columns of Arrow


class Columns:
    """The columns of rows of one class, by its annotations; see `columns_of`.

    Each row also has its line or source, a status, its number of tokens, and a digest that is equal
    for rows of equal content.

    Attributes:
        schema: Arrow's.
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

    def batch(self, where: str, rows: Iterable[Any]) -> Any:
        """Return rows, and records that became none, as a batch of Arrow.

        Args:
            where: The file; a source that is no line of it is stored in full.
        """
        import pyarrow as pa

        columns: dict[str, list[Any]] = {name: [] for name in self.schema.names}
        for row in rows:
            line = row.source.removeprefix(f"{where}:")
            is_line = line.isdecimal()
            columns["line"].append(int(line) if is_line else -1)
            columns["source"].append(None if is_line else row.source)
            values: dict[str, Any] = dict.fromkeys(self._names)
            status, tokens, digest = KEPT, 0, 0
            if isinstance(row, Dropped):
                status = 1 + row.why
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
        """Return a row of a table and its digest; None: its media have not been read."""
        values: dict[str, Any] = {}
        ints: dict[str, bytes] = {}
        for name in self._names:
            scalar = table.column(f"row.{name}")[index]
            if name in self._media:
                media = tuple(self._media[name].opened(one, source) for one in scalar.values)
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
        is_read = all(one.is_read for name in self._media for one in self._media_of(values, name))
        return row, self._digest(row, ints) if is_read else None

    def values(self, table: Any, name: str) -> Tensor:
        """Return the numbers of a field, lists one after the other; dropped rows have none."""
        chunks = []
        for chunk in table.column(f"row.{name}").chunks:
            present = chunk.drop_null()
            chunks.append(_numbers(present.flatten() if present.type.num_fields else present))
        return torch.cat(chunks)

    def is_current(self, table: Any) -> bool:
        """Return whether all files that rows name are unchanged."""
        for name, kind in self._media.items():
            for chunk in table.column(f"row.{name}").chunks:
                media = chunk.flatten()
                stamps = zip(*(media.field(name).to_pylist() for name in kind.stamp), strict=True)
                if not all(kind.is_unchanged(*stamp) for stamp in stamps):
                    return False
        return True

    def _stored(self, row: Any) -> dict[str, Any]:
        """Return a row's values as Arrow takes them: of labels, where targets begin and end."""
        values = {name: getattr(row, name) for name in self._names}
        for name in self._labels:
            values[name] = _bounds(values[name])
        for name in self._media:
            values[name] = [one.stored() for one in self._media_of(values, name)]
        return values

    def _media_of(self, values: Mapping[str, Any], name: str) -> Sequence[Any]:
        return values[name] if name in self._tuples else (values[name],)

    def digest(self, row: Any, stored: Mapping[str, Any] | None = None) -> int:
        """Return 64 bits that are equal for rows of equal content, whatever their source."""
        stored = self._stored(row) if stored is None else stored
        return self._digest(row, {n: array("i", stored[n]).tobytes() for n in self._ints})

    def _digest(self, row: Any, ints: Mapping[str, bytes]) -> int:
        """Return the digest of a row whose integers are given as they are stored."""
        contents = [
            ints[name]
            if name in self._ints
            else self._text(name, getattr(row, name)).encode("utf-8", "surrogatepass")
            for name in self._names
        ]
        sizes = array("q", map(len, contents)).tobytes()
        digest = hashlib.blake2b(sizes + b"".join(contents), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _text(self, name: str, value: Any) -> str:
        """Return a value as text, which is the same for the value that Arrow gives back."""
        return repr(_as_stored(value, float if name in self._fractions else None))


def columns_of(kind: type[Any]) -> Columns:
    """Return the columns of a class of rows."""
    if kind not in _columns:
        _columns[kind] = Columns(kind)
    return _columns[kind]


_columns: dict[type[Any], Columns] = {}


def row_digest(row: Any) -> int:
    """Return 64 bits that are equal for rows of equal content, whatever their source."""
    return columns_of(type(row)).digest(row)


def _arrow_type(annotation: Any) -> Any:
    """Return Arrow's type for int, float, bool, str, one of them or None, tuples, and media."""
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


def _element(annotation: Any) -> Any:
    """Return the class of a field, or of the elements of its tuple; `Media` has columns."""
    return (get_args(annotation) or (annotation,))[0]


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _as_stored(value: Any, number: type[float] | None) -> Any:
    """Return a value as Arrow gives it back: tuples for lists, and numbers of its column's type."""
    if isinstance(value, list | tuple):
        return tuple(_as_stored(item, number) for item in value)
    return value if number is None or value is None else number(value)


def labels_of(ids: Sequence[int], bounds: Sequence[int]) -> tuple[int, ...]:
    """Return a row's labels: its tokens between the bounds of targets, IGNORE elsewhere."""
    labels = [IGNORE] * len(ids)
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        labels[start:stop] = ids[start:stop]
    return tuple(labels)


def _bounds(labels: Sequence[int]) -> list[int]:
    """Return where targets begin and end: [3, 7, 12, 15]."""
    bounds: list[int] = []
    is_target = False
    for number, label in enumerate(labels):
        if (label != IGNORE) is not is_target:
            bounds.append(number)
            is_target = not is_target
    return [*bounds, len(labels)] if is_target else bounds


def _numbers(column: Any) -> Tensor:
    return torch.tensor(column.to_numpy())


# ------------------------------------------------------------------- stored rows


class StoredRows(LazyRows):
    """The rows of a file, in a table that is mapped into memory.

    Attributes:
        where: The file.
        digests: Of each row (rows,), equal for rows of equal content.
        num_read: Records of the file.
        num_dropped: Records without a row.
        counts, agreed, shared, unused: See `EncodedRows`.

    Raises:
        One of DAMAGED: The folder does not hold what `_write` writes, or is damaged.
    """

    def __init__(self, where: str, folder: Path, kind: type[Any]) -> None:
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
        table.validate(full=True)  # of lists only where they begin and end: 8 bytes of each row
        digest = hashlib.sha256()
        for batch in table.to_batches():
            _feed(digest, batch)
        if digest.hexdigest() != facts["sha256"]:
            raise ValueError("damaged")
        status = _numbers(table.column("status"))
        self._kept = (status == KEPT).nonzero().flatten()
        self._dropped = (status != KEPT).nonzero().flatten()
        self._why = status[self._dropped] - 1
        self.num_dropped = len(self._dropped)
        self.digests = _numbers(table.column("digest"))[self._kept]
        self.num_read: int = facts["num_read"]
        self.counts: dict[str, int] = Counter(facts["counts"])
        self.agreed: dict[str, str] = facts["agreed"]
        self.shared: dict[str, str] = facts["shared"]
        self.unused: list[str] = facts["unused"]
        super().__init__(_numbers(table.column("tokens"))[self._kept], self.digests)

    def row(self, place: int) -> Any:
        index = int(self._kept[place])
        source = self._source(index)
        try:
            row, digest = self._columns.row(self._table, index, source)
        except Exception as error:  # whatever other bytes look like
            raise self._damaged(source) from error
        if digest not in (None, int(self.digests[place])):
            raise self._damaged(source)
        return row

    def _damaged(self, source: str) -> DataError:
        """Return the error for a row that was not encoded so; the next start encodes it anew."""
        with contextlib.suppress(OSError):
            self._facts.unlink(missing_ok=True)
        folder = self._facts.parent
        again = f"Delete {folder} and start" if self._facts.exists() else "Start"
        return DataError(
            f"{source}: its encoded row is damaged.",
            found=f"The file that holds it has changed since it was written: {folder / ROWS}",
            fix=f"{again} again, with --resume if a step was saved: the rows are encoded anew. "
            "If it happens often, test the disk and the memory.",
        )

    def values(self, name: str) -> Tensor:
        return self._columns.values(self._table, name)

    def dropped(self, why: int) -> Sequence[str]:
        """Return the sources of the records that were dropped for this reason."""
        return [self._source(index) for index in self._dropped[self._why == why].tolist()]

    def _source(self, index: int) -> str:
        line = self._table.column("line")[index].as_py()
        return f"{self.where}:{line}" if line >= 0 else self._table.column("source")[index].as_py()

    @property
    def is_current(self) -> bool:
        """Whether all files that rows name are unchanged."""
        return self._columns.is_current(self._table)

    @property
    def num_duplicates(self) -> int:
        """Rows whose content an earlier row has."""
        return len(self) - len(self.digests.unique())

    def num_shared(self, other: StoredRows) -> int:
        """Return how many rows have a content that others have too."""
        return int(torch.isin(self.digests, other.digests).sum())

    def held_out(self, share: float) -> tuple[View, View]:
        """Return a share of the rows last, by a hash of their content, and the others first."""
        chunks = (chunk.tolist() for chunk in self.digests.split(1 << 16))
        is_out = torch.tensor([is_held_out(digest, share) for chunk in chunks for digest in chunk])
        is_out = is_out.bool()
        return View([self], (~is_out).nonzero().flatten()), View([self], is_out.nonzero().flatten())


def is_held_out(digest: int, share: float) -> bool:
    """Return whether a row of this digest is held out; equal rows are all or none of them."""
    drawn = hashlib.blake2b(str(digest).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") < share * 2**64
