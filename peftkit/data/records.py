"""Records of files and data sets, each with its file and line.

Text files (JSON Lines, a JSON array, CSV) are read strictly: UTF-8 only, no duplicate keys, no NaN,
no ragged CSV. A misread row is worse than a refused one. Errors for other files name their actual
type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from itertools import islice
from pathlib import Path

from peftkit.data.readers import (
    PART_ROWS,
    READERS,
    Fields,
    identify_by_signature,
    line_parts,
    local_path,
    open_data_set,
    read_csv,
    read_data_set,
    read_json,
    read_jsonl,
    urls_of,
)
from peftkit.errors import DataError, did_you_mean, is_url, neighbours
from peftkit.settings import DataConfig, Source


@dataclass(frozen=True, slots=True)
class Record:
    """A raw row; `source` is "file:line", or "data set:row" counting from 1."""

    fields: Fields
    source: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A record without a row; `reason` is a key of `RowEncoder.drops`."""

    source: str
    reason: str


def read_records(where: str | Sequence[Source]) -> list[Record]:
    """Read all rows of files, folders or hub data sets; see `DataConfig.train`.

    Raises:
        DataError: A source does not exist or cannot be read; with file, line and column, if any.
    """
    if isinstance(where, str):
        return list(iterate_records(where))
    return [record for source in where for record in iterate_records(source.path)]


def sources_of(data: DataConfig) -> tuple[Source, ...]:
    """Return the training files and data sets, with each pattern replaced by its files.

    Raises:
        DataError: No file matches a pattern, or the list is empty.
    """
    sources = (Source(path=data.train),) if isinstance(data.train, str) else data.train
    if not sources:
        raise DataError("data.train names no file.", found="It is an empty list.")
    return tuple(
        Source(path=path, weight=source.weight)
        for source in sources
        for path in files_of(source.path)
    )


def files_of(path: str) -> list[str]:
    """Return the sorted files that match a pattern; a path without wildcards unchanged.

    Raises:
        DataError: No file matches.
    """
    if not any(sign in path for sign in "*?[") or Path(path).expanduser().exists():
        return [path]
    if is_url(path):
        return urls_of(path)
    files = sorted(glob(str(Path(path).expanduser()), recursive=True))
    if not files:
        raise DataError(
            f"no file fits the pattern '{path}'.",
            found=f"Looked in {Path.cwd()}.",
            fix="Write a pattern such as data/*.jsonl, or name the files.",
        )
    return files


def check_exists(*sources: str | Path) -> None:
    """Check that files exist and can be read by their suffix; data sets and URLs are not opened.

    Commands call it before they load a base.

    Raises:
        DataError: A source does not exist, or its suffix is unknown.
    """
    for where in map(str, sources):
        path = Path(where).expanduser()
        if not (path.exists() or is_url(where) or _is_data_set(where)):
            raise _missing(where, path)
        if path.is_file() and path.suffix.lower() not in READERS:
            raise _unknown_suffix(path)


Part = Callable[[], list[Record]]
"""A function that reads some of a file's records, in this process or another."""


def parts(where: str) -> Iterator[Part]:
    """Yield functions, each of which reads some rows of a file, folder or data set, in order.

    For a JSON Lines file the function reads when it is called; other files are read here.

    Raises:
        DataError: The source does not exist or cannot be read.
    """
    path = local_path(where)
    reader = READERS.get(path.suffix.lower())
    if path.is_file() and reader is read_jsonl and _is_array(path):
        reader = read_json
    if path.is_file() and reader is read_jsonl:
        for start, stop, line in line_parts(path):
            yield partial(_read_lines, path, where, start, stop, line)
        return
    if path.is_file():
        if reader is None:
            raise _unknown_suffix(path)
        rows = reader(path)
    elif path.is_dir() or _is_data_set(where):
        rows = read_data_set(where)
    else:
        raise _missing(where, path)
    records = (Record(fields, f"{where}:{number}") for number, fields in rows)
    while part := list(islice(records, PART_ROWS)):
        yield partial(list, part)


def _is_array(path: Path) -> bool:
    """Return whether a file begins with a JSON array; some tools write one to a .jsonl file."""
    with open(path, "rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"[")


def _read_lines(path: Path, where: str, start: int, stop: int, line: int) -> list[Record]:
    rows = read_jsonl(path, start=start, stop=stop, line=line)
    return [Record(fields, f"{where}:{number}") for number, fields in rows]


def iterate_records(where: str) -> Iterator[Record]:
    """Yield all rows, see `read_records`; only a JSON array is in memory as a whole."""
    record = None
    for part in parts(where):
        for record in part():
            yield record
    if record is None:
        raise DataError(f"Cannot use {where}.", found="It holds no rows.")


def is_read_by_lines(path: Path) -> bool:
    """Return whether the number of a row is a line of its file."""
    return READERS.get(path.suffix.lower()) in (read_jsonl, read_csv)


def stamp_of(where: str) -> object | None:
    """Return a value that changes with a data set; None for a file, or a data set without files.

    Raises:
        DataError: There is no such data set.
    """
    if not _is_data_set(where):
        return None
    rows = open_data_set(where)
    files = [Path(file["filename"]) for file in rows.cache_files]
    stamps = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return (where, stamps, len(rows), repr(rows.features)) if files else None


_DATA_SET = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?(:[^:]+){0,2}")


def _is_data_set(where: str) -> bool:
    """Return whether a name, for which there is no file, can only mean a data set."""
    place = where.partition(":")[0]
    if Path(place).is_dir():
        return True
    path = Path(where)
    in_a_folder = path.parent != Path(".") and path.parent.is_dir()
    return (
        _DATA_SET.fullmatch(where) is not None
        and not is_url(where)
        and path.suffix.lower() not in {*READERS, ".gz", ".txt", ".zip"}
        and not in_a_folder
        and not did_you_mean(path.name, _files_next_to(path))
    )


def _files_next_to(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except OSError:
        return []


def _missing(where: str, path: Path) -> DataError:
    if path.exists():
        return DataError(f"Cannot read {where}.", found="It is not a regular file.")
    similar = neighbours(path, "*")
    return DataError(f"Cannot read {where}.", found=f"There is no such file. {similar}")


def _unknown_suffix(path: Path) -> DataError:
    with open(path, "rb") as file:
        kind = identify_by_signature(file.read(64))
    return DataError(
        f"Cannot read {path}.",
        found=kind[0] if kind else f"The suffix '{path.suffix}' is not one of a known format.",
        fix=kind[1] if kind else f"Suffixes that can be read: {', '.join(READERS)}.",
    )
