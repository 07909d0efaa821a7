"""Rows from files and data sets, each with the place it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from peftkit.config.schema import Config
from peftkit.data.strict_rows import (
    Fields,
    named_for_what_it_is,
    read_csv,
    read_json,
    read_jsonl,
)
from peftkit.errors import DataError, did_you_mean, first_few

FormatName = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]


class Source(Config):
    """One of several files or data sets to learn from."""

    path: str
    """As `train` is, if it is one."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often each of its rows is learnt in an epoch; of 0.25 every fourth row is."""


class DataConfig(Config):
    """What to learn from, and how its rows become tokens."""

    train: str | tuple[Source, ...]
    """A .jsonl, .json, .csv or .parquet file, a folder or a hub data set: "org/name",
    "org/name:split", "org/name:config:split", each also with "@revision" after the name; files by a
    pattern ("data/*.jsonl"); or a list of these: [{path: a.jsonl, weight: 2}, {path: b.jsonl}]."""
    eval: str | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Rows to measure on: a file or data set; or a share of the training rows, 0.02, which is held
    out by what each row says, so that it stays the same when rows are added; null: none."""
    format: Literal["auto"] | FormatName = "auto"
    """What a row's fields mean; auto decides by their names."""
    max_length: Annotated[int, Field(ge=2)] | None = 1024
    """Longest row in tokens, longer ones are cut; null: as long as the model can read."""
    packing: bool = True
    """Put several short rows beside each other, isolated, instead of padding. Where the model
    cannot keep them apart, true is an error; the default then is false, and the run says so."""
    chat_template: str | None = None
    """How a conversation becomes text; null: the tokenizer's own template, "chatml": ChatML,
    else a .jinja file."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Largest image in pixels, larger ones are scaled down before the model's processor sees them:
    what an image costs grows with its pixels; null: as large as that takes them."""
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


def is_json_lines(path: Path) -> bool:
    """Return whether a file is read line by line."""
    return path.is_file() and _READERS.get(path.suffix.lower()) is read_jsonl


def iterate_records(where: str) -> Iterator[Record]:
    """Yield every row, as `read_records` does; of JSON Lines and Parquet a few are in memory."""
    path = Path(where).expanduser()
    if path.is_file():
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise _unknown_suffix(path)
        rows = reader(path)
    elif path.is_dir() or _is_data_set(where):
        rows = _read_data_set(where)
    else:
        raise _missing(where, path)
    number = None
    for number, fields in rows:
        yield Record(fields, f"{where}:{number}")
    if number is None:
        raise DataError(f"Cannot use {where}.", found="It holds no rows.")


def _read_parquet(path: Path) -> Iterator[tuple[int, Fields]]:
    import datasets  # slow to import, and most runs read JSON Lines

    with open(path, "rb") as file:
        head = file.read(64)
    if not head.startswith(b"PAR1"):
        found, fix = named_for_what_it_is(head) or ("It does not begin as Parquet does.", "")
        raise DataError(f"Cannot read {path} as Parquet.", found=found, fix=fix)
    try:
        # streaming: the file is read where it lies, not copied into a cache
        rows = datasets.load_dataset(
            "parquet", data_files=str(path.resolve()), split="train", streaming=True
        )
        yield from _rows(rows)
    except Exception as problem:  # pyarrow and datasets raise a dozen unrelated kinds
        raise DataError(f"Cannot read {path} as Parquet.", found=_first_lines(problem)) from problem


def _read_data_set(where: str) -> Iterator[tuple[int, Fields]]:
    import datasets

    place, *parts = where.split(":")
    name, _, revision = place.partition("@") if not Path(place).is_dir() else (place, "", "")
    split = parts[-1] if parts else "train"
    config = parts[0] if len(parts) == 2 else None
    try:
        rows = datasets.load_dataset(name, config, split=split, revision=revision or None)
        yield from _rows(rows)
    except Exception as problem:  # network, hub, arrow and format errors share no base class
        raise DataError(
            f"Cannot load the data set '{where}'.",
            found=f"There is no such file here, and as a data set: {_first_lines(problem)}",
            fix='A data set is named "org/name", "org/name:split" or "org/name:config:split".',
        ) from problem


def _rows(rows: Any) -> Iterator[tuple[int, Fields]]:
    """Yield the rows of a data set: images as they are stored, classes by their names."""
    import datasets

    features = dict(rows.features or {})
    for name, feature in features.items():
        if isinstance(feature, datasets.Image):  # decoded later, where an error can name the row
            rows = rows.cast_column(name, datasets.Image(decode=False))
    for number, row in enumerate(rows, start=1):
        yield number, _named(_without_filling(row), features)


def _without_filling(row: Fields) -> Fields:
    """Drop nulls inside nested fields: columns give each struct the union of all rows' keys."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if item is not None}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return {key: cleaned(value) for key, value in row.items()}


def _named(row: Fields, features: Mapping[str, Any]) -> Fields:
    """Give classes that a data set numbers their names; a number outside of them stays."""

    def name(value: Any, feature: Any) -> Any:
        if isinstance(value, list):
            return [name(item, getattr(feature, "feature", None)) for item in value]
        names = getattr(feature, "names", ())
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value

    return {key: name(value, features.get(key)) for key, value in row.items()}


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Fields]]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": _read_parquet,
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
        and path.suffix.lower() not in {*_READERS, ".gz", ".tsv", ".txt", ".zip"}
        and not in_a_folder
        and not did_you_mean(path.name, _files_beside(path))
    )


def _files_beside(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except OSError:
        return []


def _missing(where: str, path: Path) -> DataError:
    names = _files_beside(path)
    rows = [name for name in names if Path(name).suffix.lower() in _READERS]
    found = "There is no such file."
    if path.exists():
        found = "It is not a regular file."
    elif not path.parent.is_dir():
        found = f"There is no folder {path.parent} in {Path.cwd()}."
    elif rows:
        found += f" In {path.parent}: {first_few(rows, 8, ', ')}"
    return DataError(f"Cannot read {where}.", found=found, fix=did_you_mean(path.name, names))


def _unknown_suffix(path: Path) -> DataError:
    with open(path, "rb") as file:
        what = named_for_what_it_is(file.read(64))
    return DataError(
        f"Cannot read {path}.",
        found=what[0] if what else f"The ending '{path.suffix}' says nothing about its format.",
        fix=what[1] if what else f"Endings that can be read: {', '.join(_READERS)}.",
    )


def _first_lines(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(problem).__name__
