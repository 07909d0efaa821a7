"""A file's rows as tokens, a block of rows at a time, in several processes where that pays.

Only what is in hand is in memory: a block is read, given its meaning, encoded, and handed on in
the order of the file.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from peftkit.data.encode import Encoder
from peftkit.data.format import parse
from peftkit.data.load import FormatName, Record, is_json_lines, iterate_records
from peftkit.data.pack import IGNORE, Row
from peftkit.data.strict_rows import read_jsonl

KEPT, NOTHING, BEYOND = 0, 1, 2
"""What became of a row: kept, nothing to learn, its answer lies beyond the cut."""
BLOCK_ROWS = 1_000
BLOCK_BYTES = 1 << 20
POOL_BYTES = 16 << 20
"""A file of at least this size is worth starting processes for."""
MAX_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the tokens of a row depend on, besides the row."""

    tokenizer: Any
    template: str | None
    format: Literal["auto"] | FormatName
    max_length: int


@dataclass(slots=True)
class Block:
    """Some rows of a file, encoded, column by column.

    Attributes:
        lines: Where each row stands in its file. status: What became of it (KEPT ...).
        cuts: 1 where a row was cut. lengths: Tokens of each.
        input_ids: Of all rows one after the other; a row that is not kept has none.
        bounds: Where what is learnt begins and ends in each row, one row after the other.
        num_bounds: How many of these each row has.
        digests: A number that says what a row teaches, equal for equal rows.
        format, kind: Of the rows; how they are prompted.
        names, unused: Fields that the rows have, and those that none of them needed.
    """

    format: FormatName
    kind: str
    names: tuple[str, ...]
    unused: tuple[str, ...]
    num_off_prompt: int = 0
    lines: array[int] = field(default_factory=lambda: array("q"))
    status: array[int] = field(default_factory=lambda: array("b"))
    cuts: array[int] = field(default_factory=lambda: array("b"))
    lengths: array[int] = field(default_factory=lambda: array("i"))
    input_ids: array[int] = field(default_factory=lambda: array("i"))
    bounds: array[int] = field(default_factory=lambda: array("i"))
    num_bounds: array[int] = field(default_factory=lambda: array("i"))
    digests: array[int] = field(default_factory=lambda: array("q"))


def blocks(where: str, settings: Settings, processes: int | None = None) -> Iterator[Block]:
    """Yield the rows of a file or data set, encoded, in their order.

    Args:
        processes: How many encode; by default as many as there are cores for a large file of JSON
            Lines, else one.

    Raises:
        DataError: Rows cannot be read or used; names the first of them.
    """
    path = Path(where).expanduser()
    number = _num_processes(path) if processes is None else processes
    if number > 1 and is_json_lines(path):
        yield from _in_processes(path, where, settings, number)
        return
    encoder = Encoder(settings.tokenizer, settings.template)
    records = iterate_records(where)
    while block := list(islice(records, BLOCK_ROWS)):
        yield _encoded(block, where, settings, encoder)


def _num_processes(path: Path) -> int:
    if not path.is_file() or path.stat().st_size < POOL_BYTES:
        return 1
    if sys.platform in ("win32", "darwin"):  # no fork: a program would have to be made for it
        return 1
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES)


def _in_processes(path: Path, where: str, settings: Settings, number: int) -> Iterator[Block]:
    """Encode parts of a file of JSON Lines in processes, few parts ahead of what is read."""
    context = multiprocessing.get_context("fork")
    started = (str(path), where, settings)
    with ProcessPoolExecutor(number, context, initializer=_begin, initargs=started) as pool:
        waiting: deque[Future[list[Block]]] = deque()
        parts = _parts(path)
        try:
            for part in parts:
                with warnings.catch_warnings():  # of forks beside threads: no child uses those
                    warnings.simplefilter("ignore", DeprecationWarning)
                    waiting.append(pool.submit(_part, *part))
                if len(waiting) > 2 * number:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _parts(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, last byte, number of the first line) of parts of a file, whole lines."""
    line, start = 1, 0
    with open(path, "rb") as file:
        while chunk := file.read(BLOCK_BYTES):
            rest = b"" if chunk.endswith(b"\n") else file.readline()
            stop = start + len(chunk) + len(rest)
            yield start, stop, line
            line += chunk.count(b"\n") + rest.count(b"\n")
            start = stop


_own: tuple[Path, str, Settings, Encoder] | None = None
"""What a process that encodes works on."""


def _begin(path: str, where: str, settings: Settings) -> None:
    global _own
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _own = Path(path), where, settings, Encoder(settings.tokenizer, settings.template)


def _part(start: int, stop: int, line: int) -> list[Block]:
    assert _own is not None
    path, where, settings, encoder = _own
    records = (
        Record(fields, f"{where}:{number}")
        for number, fields in read_jsonl(path, start=start, stop=stop, line=line)
    )
    found = list(records)
    return [_encoded(found, where, settings, encoder)] if found else []


def _encoded(records: Sequence[Record], where: str, settings: Settings, encoder: Encoder) -> Block:
    parsed = parse(records, settings.format, where=where)
    names = tuple(dict.fromkeys(name for record in records for name in record.fields))
    kind = encoder.style(parsed.examples[0]).kind
    block = Block(parsed.format, kind, names, parsed.unused)
    before = encoder.num_off_prompt
    for example in parsed.examples:
        _add(block, encoder.encode(example), settings.max_length)
    block.num_off_prompt = encoder.num_off_prompt - before
    return block


def _add(block: Block, row: Row, max_length: int) -> None:
    """Add a row, cut to its longest length; without tokens if nothing is left to learn."""
    ids, labels = row.input_ids[:max_length], row.labels[:max_length]
    bounds = _bounds(labels)
    status = NOTHING if row.num_targets == 0 else KEPT if bounds else BEYOND
    if status != KEPT:
        ids = ()
    tokens = array("i", ids)
    block.lines.append(int(row.source.rpartition(":")[2]))
    block.status.append(status)
    block.cuts.append(status == KEPT and len(row.input_ids) > max_length)
    block.lengths.append(len(tokens))
    block.input_ids.extend(tokens)
    block.bounds.extend(bounds)
    block.num_bounds.append(len(bounds))
    told = tokens.tobytes() + b"|" + array("i", bounds).tobytes()
    digest = hashlib.blake2b(told, digest_size=8)
    block.digests.append(int.from_bytes(digest.digest(), "little", signed=True))


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


def union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return names in their order, each once."""
    return tuple(dict.fromkeys(name for part in parts for name in part))
