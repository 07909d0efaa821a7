"""Encoded rows in an Arrow file that is mapped into memory, not read: any number of rows fits.

The file lies in the cache of Hugging Face datasets, under a name made of all that its content
depends on: the bytes of the data, the tokenizer, the template, the settings, and the code that
encodes. So a second start encodes nothing. It is written under another name and renamed when it is
whole; of two processes that make the same one, the first to end wins. Arrow is used directly, which
datasets brings: its own `map` cannot say which line is wrong, nor how far it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from peftkit.data import chat, encode, encoding, format, messages, strict_rows
from peftkit.data.encode import Style
from peftkit.data.encoding import KEPT, Block, Settings, blocks, labels_of
from peftkit.data.format import parse
from peftkit.data.load import is_json_lines, read_records
from peftkit.data.pack import Row, joined, packing
from peftkit.errors import DataError, RunError
from peftkit.events import Listener, Notice, Progress, ignore

ROWS, FACTS = "rows.arrow", "facts.json"
IN_HAND = 4_096
"""Rows kept as Python has them: of the next steps, and those just used."""
TOLD_ROWS = 10_000
"""Encoding fewer rows is not worth a word."""
REREAD_BYTES = 256 << 20
"""A larger file with wrong rows is not read again to count them all."""


class LazyRows(Sequence[Row]):
    """Rows made when they are asked for; the same row is the same object for some time.

    Attributes:
        num_tokens: Of each row.
        fingerprint: Of what the rows teach.
    """

    num_tokens: Sequence[int]
    fingerprint: str

    def __init__(self) -> None:
        self._in_hand: OrderedDict[int, Row] = OrderedDict()

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return Chosen(self, range(len(self))[index])
        place = range(len(self))[index]
        found = self._in_hand.get(place)
        if found is None:
            found = self._in_hand[place] = self.row(place)
            if len(self._in_hand) > IN_HAND:
                self._in_hand.popitem(last=False)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def row(self, place: int) -> Row:
        """Make a row."""
        raise NotImplementedError


class Chosen(Sequence[Row]):
    """Some rows of others, made when they are asked for."""

    def __init__(self, rows: LazyRows, places: Sequence[int]) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return Chosen(self._rows, self._places[index])
        return self._rows[self._places[index]]

    @property
    def num_tokens(self) -> Sequence[int]:
        """Tokens of each row."""
        return array("i", (self._rows.num_tokens[place] for place in self._places))


class StoredRows(LazyRows):
    """The rows of a file, one document each, in a table that is mapped into memory.

    Attributes:
        facts: What was counted when they were encoded.
        digests: A number for each row, equal where rows teach the same.
    """

    def __init__(self, where: str, table: Any, facts: dict[str, Any]) -> None:
        super().__init__()
        self.where, self.facts, self._table = where, facts, table
        status = table.column("status").to_numpy()
        self._kept = array("q", (status == KEPT).nonzero()[0].tobytes())
        self._status = status
        lengths = table.column("length").to_numpy()
        self.num_tokens = array("i", lengths[status == KEPT].tobytes())
        self.digests = table.column("digest").to_numpy()[status == KEPT]
        self.fingerprint = f"sha256:{hashlib.sha256(self.digests.tobytes()).hexdigest()[:32]}"

    def row(self, place: int) -> Row:
        at = self._kept[place]
        ids = tuple(self._table.column("input_ids")[at].as_py())
        bounds = self._table.column("bounds")[at].as_py()
        return Row(ids, labels_of(ids, bounds), (len(ids),), self.source(at))

    def source(self, at: int) -> str:
        """Return where a row came from, kept or not."""
        return f"{self.where}:{self._table.column('line')[int(at)].as_py()}"

    def dropped(self, status: int) -> list[str]:
        """Return the sources of rows of which this became."""
        return [self.source(at) for at in (self._status == status).nonzero()[0]]

    def style(self, template: str | None) -> Style:
        """Return how generation has to prompt a model that learnt from them."""
        kind = self.facts["kind"]
        return Style(kind, template if kind == "chat" else None)

    def num_shared(self, other: StoredRows) -> int:
        """Return how many rows others teach too."""
        mine = set(self.digests.tolist())
        shared = mine.intersection(other.digests.tolist())
        return sum(digest in shared for digest in self.digests.tolist())

    @property
    def num_read(self) -> int:
        """Rows of the file."""
        return len(self._status)

    @property
    def num_cut(self) -> int:
        """Rows that were longer than they may be."""
        return int(self._table.column("cut").to_numpy().sum())

    @property
    def num_targets(self) -> int:
        """Tokens that are learnt, of all rows."""
        return int(self.facts["num_targets"])

    @property
    def num_duplicates(self) -> int:
        """Rows that teach what one before them does."""
        return len(self.digests) - len(set(self.digests.tolist()))


class Subset(LazyRows):
    """Some of other rows, for good: a split of a file."""

    def __init__(self, rows: LazyRows, places: Sequence[int]) -> None:
        super().__init__()
        self._rows, self._places = rows, array("q", places)
        self.num_tokens = array("i", (rows.num_tokens[place] for place in places))
        told = rows.fingerprint.encode() + self._places.tobytes()
        self.fingerprint = f"sha256:{hashlib.sha256(told).hexdigest()[:32]}"

    def row(self, place: int) -> Row:
        return self._rows.row(self._places[place])


class PackedRows(LazyRows):
    """Whole documents together in rows of at most `max_length` tokens; see `pack.pack`."""

    def __init__(self, rows: LazyRows, max_length: int) -> None:
        super().__init__()
        self._rows, lengths = rows, rows.num_tokens
        self._members = array("q")
        self._starts = array("q", [0])
        self.num_tokens = array("i")
        for group in packing(lengths, max_length):
            self._members.extend(group)
            self._starts.append(len(self._members))
            self.num_tokens.append(sum(lengths[n] for n in group))
        told = f"{rows.fingerprint} in rows of {max_length}"
        self.fingerprint = f"sha256:{hashlib.sha256(told.encode()).hexdigest()[:32]}"

    @property
    def document_lengths(self) -> Sequence[int]:
        """Tokens of each document."""
        return self._rows.num_tokens

    def row(self, place: int) -> Row:
        members = self._members[self._starts[place] : self._starts[place + 1]]
        return joined([self._rows.row(member) for member in members])


def encoded(
    where: str,
    settings: Settings,
    *,
    on_event: Listener = ignore,
    processes: int | None = None,
) -> StoredRows:
    """Return the rows of a file or data set as tokens, encoded now or before.

    Raises:
        DataError: Rows cannot be read or used; names them.
        RunError: The disk has no room for them.
    """
    path = Path(where).expanduser()
    folder, num_lines = None, 0
    if path.is_file():
        name, num_lines = _name_of(path, settings)
        folder = cache_folder() / name
        try:
            found = _open(where, folder)
            if found.num_read >= TOLD_ROWS:
                on_event(Notice(f"{where}: {found.num_read:,} rows were encoded before."))
            return found
        except (OSError, ValueError, KeyError):  # not there, or harmed
            shutil.rmtree(folder, ignore_errors=True)
    try:
        return _encode(where, folder, num_lines, settings, on_event, processes)
    except OSError as problem:
        raise RunError(
            f"cannot keep the encoded rows of {where}",
            found=f"{problem}; they go to {cache_folder()}.",
            fix="Make room there, or set HF_HOME to a folder on a larger disk.",
        ) from problem


def cache_folder() -> Path:
    """Return where encoded rows are kept: beside the data sets of Hugging Face."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets") / "peftkit"


def _encode(
    where: str,
    folder: Path | None,
    num_lines: int,
    settings: Settings,
    on_event: Listener,
    processes: int | None,
) -> StoredRows:
    """Encode into a folder of another name; rename it when it is whole."""
    parent = cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="making-", dir=parent))
    try:
        began = time.perf_counter()
        found = blocks(where, settings, processes)
        number = _write(where, temporary, _told(found, where, num_lines, on_event))
        seconds = time.perf_counter() - began
        if number >= TOLD_ROWS:
            rate = number / max(seconds, 1e-9)
            on_event(
                Notice(f"{where}: encoded {number:,} rows in {seconds:.0f} s, {rate:,.0f} rows/s.")
            )
        if folder is None:  # a data set's content has no name: mapped, and gone with the process
            return _open(where, temporary)
        with contextlib.suppress(OSError):  # another process was there first
            os.rename(temporary, folder)
        return _open(where, folder)
    except DataError:
        path = Path(where).expanduser()
        if not path.is_file() or path.stat().st_size <= REREAD_BYTES:
            parse(read_records(where), settings.format, where=where)  # counts all wrong rows
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _told(
    found: Iterator[Block], where: str, num_lines: int, on_event: Listener
) -> Iterator[Block]:
    """Pass blocks on, and tell how far it is; all have to be of one format."""
    done, first = 0, None
    for block in found:
        first = first or block
        if block.format != first.format or block.kind != first.kind:
            raise DataError(
                f"Cannot use {where}.",
                found=f"{where}:{block.lines[0]} is of the format '{block.format}', the first row "
                f"of the format '{first.format}'.",
                fix="Give rows of one format, or set data.format.",
            )
        yield block
        done = block.lines[-1] if num_lines else done + len(block.lines)
        on_event(Progress(f"Encoding {where}", done, max(done, num_lines)))


def _write(where: str, folder: Path, found: Iterator[Block]) -> int:
    """Write blocks as an Arrow file and what was counted beside it; return the number of rows."""
    import pyarrow as pa

    types = {
        "line": pa.int64(),
        "status": pa.int8(),
        "cut": pa.int8(),
        "length": pa.int32(),
        "input_ids": pa.large_list(pa.int32()),
        "bounds": pa.large_list(pa.int32()),
        "digest": pa.int64(),
    }
    schema = pa.schema(types)
    number = targets = off_prompt = 0
    names: dict[str, None] = {}
    used: set[str] = set()
    first: Block | None = None

    def lists(values: array[int], counts: array[int]) -> Any:
        offsets = array("q", [0])
        for count in counts:
            offsets.append(offsets[-1] + count)
        flat = pa.array(memoryview(values), pa.int32())
        return pa.LargeListArray.from_arrays(pa.array(memoryview(offsets), pa.int64()), flat)

    with pa.OSFile(str(folder / ROWS), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for block in found:
            first = first or block
            columns = [
                pa.array(memoryview(block.lines), pa.int64()),
                pa.array(memoryview(block.status), pa.int8()),
                pa.array(memoryview(block.cuts), pa.int8()),
                pa.array(memoryview(block.lengths), pa.int32()),
                lists(block.input_ids, block.lengths),
                lists(block.bounds, block.num_bounds),
                pa.array(memoryview(block.digests), pa.int64()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            number += len(block.lines)
            targets += sum(block.bounds[1::2]) - sum(block.bounds[::2])
            off_prompt += block.num_off_prompt
            names |= dict.fromkeys(block.names)
            used |= set(block.names) - set(block.unused)
    if first is None:
        raise DataError(f"Cannot use {where}.", found="It holds no rows.")
    facts = {
        "format": first.format,
        "kind": first.kind,
        "unused": [name for name in names if name not in used],
        "num_off_prompt": off_prompt,
        "num_targets": targets,
        "num_rows": number,
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    return number


def _open(where: str, folder: Path) -> StoredRows:
    import pyarrow as pa

    facts = json.loads((folder / FACTS).read_bytes())
    with pa.memory_map(str(folder / ROWS)) as file:
        table = pa.ipc.open_stream(file).read_all()
    if len(table) != facts["num_rows"]:
        raise ValueError("torn")
    return StoredRows(where, table, facts)


def _name_of(path: Path, settings: Settings) -> tuple[str, int]:
    """Return a name made of all that the encoded rows of a file depend on; and its lines."""
    digest, num_lines = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            num_lines += chunk.count(b"\n")
    for module in (chat, encode, encoding, format, messages, strict_rows):
        digest.update(Path(str(module.__file__)).read_bytes())
    tokenizer = settings.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab())
    told = (
        path.suffix.lower(),
        type(tokenizer).__name__,
        words,
        repr(sorted(tokenizer.special_tokens_map.items())),
        tokenizer.chat_template,
        repr(getattr(tokenizer, "init_kwargs", {}).get("add_bos_token")),
        settings.template,
        settings.format,
        settings.max_length,
    )
    digest.update(repr(told).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:40], num_lines if is_json_lines(path) else 0
