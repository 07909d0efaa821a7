"""Rows from files and data sets, each with the place it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from peftkit.config.schema import Config
from peftkit.data.data_sets import open_data_set, read_data_set, read_parquet
from peftkit.data.strict_rows import (
    Fields,
    line_parts,
    named_for_what_it_is,
    read_csv,
    read_json,
    read_jsonl,
)
from peftkit.errors import DataError, did_you_mean, first_few, neighbours

PART_ROWS = 1_000
CHAT = ("chat_template", "chat_template_kwargs")
"""Fields of the data section that say how a conversation becomes text."""
FormatName = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]


class Source(Config):
    """One of several files or data sets to learn from."""

    path: str
    """As `train` is, if it is one."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often each of its rows is learnt in an epoch; of 0.25 every fourth row is."""


class DataConfig(Config):
    """The data, and how its rows become tokens."""

    train: str | tuple[Source, ...]
    """A .jsonl, .json, .csv, .tsv or .parquet file, a folder or a hub data set: "org/name",
    "org/name:split", "org/name:config:split", each also with "@revision" after the name; files by a
    pattern ("data/*.jsonl"); or a list of these: [{path: a.jsonl, weight: 2}, {path: b.jsonl}]."""
    eval: str | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Rows to measure on: a file or data set; or a share of the training rows, 0.02, split
    by a hash of the row's content, so that it stays the same when rows are added; null: none."""
    format: Literal["auto"] | FormatName = "auto"
    """What a row's fields mean; auto decides by their names."""
    max_length: Annotated[int, Field(ge=2)] | None = 1024
    """Maximum length of a row in tokens, longer ones are truncated; null: the model's maximum."""
    packing: bool = True
    """Pack several short rows into one, without attention between them, instead of padding. Where
    the model cannot do that, true is an error; the default then is false, with a notice."""
    chat_template: str | None = None
    """How a conversation becomes text; null: the tokenizer's own template, "chatml": ChatML,
    else a .jinja file."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables of the chat template: {enable_thinking: false}. Kept with the adapter, so that it
    is prompted with them too."""
    reasoning: Literal["learn", "context", "drop"] = "learn"
    """What the assistant thought before it answers (reasoning_content, or <think> in its text), as
    far as the template writes it: learnt, only read before the answer, or left out."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Largest image in pixels, larger ones are scaled down before the model's processor sees them:
    what an image costs grows with its pixels; null: as large as that takes them."""
    video_frames: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Frames of a video that the model is shown, evenly over its length; null: 16."""
    max_dropped: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of rows with nothing to learn that is left out without being an error."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """What is learnt from, patterns in its files' place.

        Raises:
            DataError: No file fits a pattern, or the list is empty.
        """
        given = (Source(path=self.train),) if isinstance(self.train, str) else self.train
        if not given:
            raise DataError("data.train names no file.", found="It is an empty list.")
        return tuple(
            Source(path=path, weight=source.weight)
            for source in given
            for path in files_of(source.path)
        )

    @property
    def train_name(self) -> str:
        """What is learnt from, in words."""
        if isinstance(self.train, str):
            return self.train
        return first_few([source.path for source in self.train], 4, ", ")

    @property
    def asks_to_pack(self) -> bool:
        """Whether packing was asked for, and is not only the default."""
        return self.packing and "packing" in self.model_fields_set

    def without_packing(self) -> DataConfig:
        """Return the same with one document in each row."""
        return self.model_copy(update={"packing": False})


@dataclass(frozen=True, slots=True)
class Record:
    """A row as it was read; `source` is "file:line", or "data set:row" counting from 1."""

    fields: Fields
    source: str


def files_of(path: str) -> list[str]:
    """Return the files that a pattern names, sorted; what is no pattern names itself.

    Raises:
        DataError: No file fits.
    """
    if not any(sign in path for sign in "*?[") or Path(path).expanduser().exists():
        return [path]
    found = sorted(glob(str(Path(path).expanduser()), recursive=True))
    if not found:
        raise DataError(
            f"no file fits the pattern '{path}'.",
            found=f"Looked in {Path.cwd()}.",
            fix="Write a pattern such as data/*.jsonl, or name the files.",
        )
    return found


def read_records(where: str | Sequence[Source]) -> list[Record]:
    """Read every row of a file, a folder or a hub data set (see `DataConfig.train`), or of several.

    Raises:
        DataError: It cannot be found or read; with file, line and column where there are any.
    """
    if isinstance(where, str):
        return list(iterate_records(where))
    return [record for source in where for record in iterate_records(source.path)]


Part = Callable[[], list[Record]]
"""Reads some of a source's rows, in this process or in another one."""


def parts(where: str) -> Iterator[Part]:
    """Yield what reads the rows of a file, a folder or a data set, some rows each, in their order.

    Of JSON Lines each part is read where it is called; of all else rows are read now.

    Raises:
        DataError: It cannot be found or read.
    """
    path = Path(where).expanduser()
    reader = _READERS.get(path.suffix.lower())
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


def _read_lines(path: Path, where: str, start: int, stop: int, line: int) -> list[Record]:
    rows = read_jsonl(path, start=start, stop=stop, line=line)
    return [Record(fields, f"{where}:{number}") for number, fields in rows]


def iterate_records(where: str) -> Iterator[Record]:
    """Yield every row, as `read_records` does; few of them are in memory, but of JSON."""
    record = None
    for part in parts(where):
        for record in part():
            yield record
    if record is None:
        raise DataError(f"Cannot use {where}.", found="It holds no rows.")


def is_read_by_lines(path: Path) -> bool:
    """Return whether a row's number is that of a line of its file."""
    return _READERS.get(path.suffix.lower()) in (read_jsonl, read_csv)


def stamp_of(where: str) -> object | None:
    """Return what changes when a data set does; None where it is no data set, or not in files.

    Raises:
        DataError: It cannot be found.
    """
    if not _is_data_set(where):
        return None
    rows = open_data_set(where)
    files = [Path(file["filename"]) for file in rows.cache_files]
    stamps = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return (where, stamps, len(rows), repr(rows.features)) if files else None


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Fields]]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}
_DATA_SET = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?(:[^:]+){0,2}")


def _is_data_set(where: str) -> bool:
    """Return whether a name that is no file can only mean a data set."""
    place = where.partition(":")[0]
    if Path(place).is_dir():
        return True
    path = Path(where)
    in_a_folder = path.parent != Path(".") and path.parent.is_dir()
    return (
        _DATA_SET.fullmatch(where) is not None
        and path.suffix.lower() not in {*_READERS, ".gz", ".txt", ".zip"}
        and not in_a_folder
        and not did_you_mean(path.name, _files_beside(path))
    )


def _files_beside(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except OSError:
        return []


def _missing(where: str, path: Path) -> DataError:
    found = "It is not a regular file."
    if not path.exists():
        found = f"There is no such file. {neighbours(path, '*')}"
    return DataError(f"Cannot read {where}.", found=found)


def _unknown_suffix(path: Path) -> DataError:
    with open(path, "rb") as file:
        what = named_for_what_it_is(file.read(64))
    return DataError(
        f"Cannot read {path}.",
        found=what[0] if what else f"The ending '{path.suffix}' says nothing about its format.",
        fix=what[1] if what else f"Endings that can be read: {', '.join(_READERS)}.",
    )
