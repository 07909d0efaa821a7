"""Readers of JSON Lines, JSON, CSV, Parquet and hub data sets: rows as dicts with their line."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from peftkit.errors import DataError, is_url
from peftkit.files.strict_json import AmbiguousJsonError, strict_decoder

Fields = dict[str, Any]
PART_ROWS = 1_000
PART_BYTES = 1 << 20

_JSONL_FIX = "A .jsonl file holds one complete JSON object per line."
_SEPARATOR = re.compile(r'"?sep=(.)"?\s*')
_TO_UTF8 = "Convert it: iconv -f {} -t UTF-8 {} > utf8{}"

# first bytes of files that are often given by mistake: (bytes, type, fix)
_SIGNATURES = (
    (b"\x1f\x8b", "It is compressed with gzip.", "Unpack it first: gunzip FILE."),
    (
        b"PK\x03\x04",
        "It is a zip archive, as are Excel's files.",
        "Unpack it and give the file inside; from Excel, save the sheet as CSV UTF-8.",
    ),
    (b"PAR1", "It is a Parquet file.", "Rename it to .parquet."),
    (b"\x80\x04", "It is a pickle; peftkit never opens one.", "Save the rows as JSON Lines."),
    (b"\x80\x05", "It is a pickle; peftkit never opens one.", "Save the rows as JSON Lines."),
    (
        b"version https://git-lfs",
        "It is a git-lfs pointer, not the file itself.",
        "Fetch the file: git lfs pull.",
    ),
)


def identify_by_signature(head: bytes) -> tuple[str, str] | None:
    """Return (type, fix) for the first bytes of a file that holds no text; None if it may."""
    if not head.strip():
        return "It is empty.", "Give a file with at least one row."
    for signature, kind, fix in _SIGNATURES:
        if head.startswith(signature):
            return kind, fix
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "It is an HTML page.", "Download the file itself, not the page that shows it."
    return None


def local_path(where: str) -> Path:
    """Return the path of a file; of a URL, such as s3://bucket/rows.jsonl, the path of a copy."""
    if not is_url(where):
        return Path(where).expanduser()
    from peftkit.files.remote import fetch

    return fetch(where)


def urls_of(pattern: str) -> list[str]:
    """Return the URLs that match a pattern; over https, which has no listing, the URL itself."""
    if pattern.startswith("https:"):
        return [pattern]
    from peftkit.files.remote import matching

    return matching(pattern)


def read_jsonl(
    path: Path, *, start: int = 0, stop: int | None = None, line: int = 1
) -> Iterator[tuple[int, Fields]]:
    """Yield (line, object) of a JSON Lines file; blank lines are skipped.

    Args:
        start, stop: Byte range; only whole lines within it are read.
        line: Number of the first line in the range.
    """
    bytes_left = sys.maxsize if stop is None else stop - start
    with open(path, "rb") as file:
        if start == 0:
            _check_text(path, file.read(4096))
        file.seek(start)
        for number, raw in enumerate(file, start=line):
            bytes_left -= len(raw)
            if bytes_left < 0:
                break
            text = _decoded(path, raw, number)
            if not text.strip():
                continue
            yield number, _object(_parsed(text, f"{path}:{number}"), f"{path}:{number}")


def line_parts(path: Path) -> Iterator[tuple[int, int, int]]:
    """Split a file between lines; yield (first byte, end, number of the first line)."""
    line, start = 1, 0
    with open(path, "rb") as file:
        while (chunk := file.read(PART_BYTES)) or start == 0:
            rest = b"" if chunk.endswith(b"\n") else file.readline()
            stop = start + len(chunk) + len(rest)
            yield start, stop, line
            if not chunk:  # an empty file: the reader raises
                break
            line += chunk.count(b"\n") + rest.count(b"\n")
            start = stop


def read_json(path: Path) -> Iterator[tuple[int, Fields]]:
    """Yield (number from 1, object) of a JSON file with an array of objects.

    The array may be the only list in an object: {"data": [...]}.
    """
    raw = path.read_bytes()
    _check_text(path, raw[:4096])
    text = _decoded(path, raw, 1)
    rows, end = _decode(text, len(text) - len(text.lstrip()), str(path), skip_lines=True)
    if isinstance(rows, dict) and not text[end:].strip():
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else rows
    if not isinstance(rows, list) or text[end:].strip():
        lines = "JSON Lines" if isinstance(rows, dict) and text[end:].strip() else "something else"
        raise DataError(
            f"Cannot read {path} as a JSON array.",
            found=f"It holds {lines}, or more than one value.",
            fix="A .json file holds an array of rows, [{...}, {...}]; JSON Lines end in .jsonl.",
        )
    for number, value in enumerate(rows, start=1):
        yield number, _object(value, f"{path}:{number}")


def read_csv(path: Path) -> Iterator[tuple[int, Fields]]:
    """Yield (line, cells by column) of a CSV file with a header row; every cell is text.

    The separator is that of Excel's first line ("sep=;"), or a comma; if the header has none, a
    semicolon or tab. A column without a name, such as pandas' index, is called "column 1".
    """
    with open(path, "rb") as file:
        _check_text(path, file.read(4096))
    limit = csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 KiB
    before = 0
    try:
        delimiter, before = _delimiter(path)
        lines = islice(_csv_lines(path), before, None)
        reader = csv.reader(lines, strict=True, delimiter=delimiter)
        header = [name or f"column {n}" for n, name in enumerate(next(reader), 1)]
        _check_header(path, header)
        # cells may span lines: a row begins after the previous one
        line = before + reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                raise DataError(
                    f"Cannot read {path}:{line}.",
                    found=f"The row has {len(cells)} cells, the header {len(header)}.",
                    fix="Put cells with line breaks or separators in double quotes.",
                )
            if cells:
                yield line, dict(zip(header, cells, strict=True))
            line = before + reader.line_num + 1
    except csv.Error as problem:
        where = f"{path}:{before + reader.line_num}"
        raise DataError(f"Cannot read {where} as CSV.", found=str(problem)) from None
    finally:
        csv.field_size_limit(limit)


def _delimiter(path: Path) -> tuple[str, int]:
    """Return the separator of cells, and the number of lines before the header."""
    if named := _SEPARATOR.fullmatch(next(_csv_lines(path))):
        return named[1], 1
    if path.suffix.lower() == ".tsv":
        return "\t", 0
    header = next(csv.reader(_csv_lines(path), strict=True))
    if len(header) > 1:
        return ",", 0
    return next((sign for sign in ";\t" if sign in header[0]), ","), 0


def _csv_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, with any line ending."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            for line in file:
                if "\0" in line:
                    raise UnicodeError
                yield line
        except UnicodeError:
            _decoded(path, path.read_bytes(), 1)  # raises, with line and column
            raise


def _check_header(path: Path, header: list[str]) -> None:
    if twice := [name for n, name in enumerate(header) if name in header[:n]]:
        problem = f"The column {twice[0]!r} is given twice."
        raise DataError(f"Cannot use the header of {path}.", found=problem, fix="Rename one.")


def _check_text(path: Path, head: bytes) -> None:
    kind = identify_by_signature(head)
    if kind is None and head.startswith((b"\xff\xfe", b"\xfe\xff")):
        kind = "It is UTF-16, not UTF-8.", _TO_UTF8.format("UTF-16", path, path.suffix)
    if kind is not None:
        raise DataError(f"Cannot read {path}.", found=kind[0], fix=kind[1])


def _decoded(path: Path, raw: bytes, line: int) -> str:
    """Decode UTF-8; `line` is the number of the first line of `raw`."""
    if line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        where = _position(raw[: problem.start].decode("utf-8"), line)
        raise DataError(
            f"Cannot read {path}:{where}.",
            found=f"The byte 0x{raw[problem.start]:02x} is not UTF-8; the file is probably Latin-1 "
            "(Windows-1252).",
            fix=_TO_UTF8.format("WINDOWS-1252", path, path.suffix),
        ) from None
    if "\0" in text:
        where = _position(text[: text.index("\0")], line)
        fix = "The file is damaged, or binary: write it again as UTF-8 text."
        raise DataError(f"Cannot read {path}:{where}.", found="There is a NUL byte.", fix=fix)
    return text


def _position(before: str, line: int) -> str:
    """Return "line:column" of the end of `before`; `line` is the number of its first line."""
    return f"{line + before.count(chr(10))}:{len(before) - before.rfind(chr(10))}"


def _parsed(line: str, where: str) -> Any:
    start = len(line) - len(line.lstrip())
    value, end = _decode(line, start, where)
    if line[end:].strip():
        rest = end + len(line[end:]) - len(line[end:].lstrip())
        problem = "There is more after the end of the object."
        raise DataError(f"Cannot read {where}:{rest + 1} as JSON.", found=problem, fix=_JSONL_FIX)
    return value


def _decode(text: str, at: int, where: str, *, skip_lines: bool = False) -> tuple[object, int]:
    """Decode one JSON value at an offset; `skip_lines` if `where` lacks the line."""
    try:
        return DECODER.raw_decode(text, at)
    except json.JSONDecodeError as problem:
        place = f"{problem.lineno}:{problem.colno}" if skip_lines else str(problem.pos + 1)
        fix = "" if skip_lines else _JSONL_FIX
        raise DataError(
            f"Cannot read {where}:{place} as JSON.", found=f"{problem.msg}.", fix=fix
        ) from None
    except AmbiguousJsonError as problem:
        place = f"{where}:{_position(text[:at], 1)}" if skip_lines else where
        raise DataError(f"Cannot use {place}.", found=str(problem)) from None
    except RecursionError:
        raise DataError(f"Cannot read {where}.", found="It is nested too deeply.") from None


def _bounded(text: str) -> int:
    if len(text) > 400:
        raise AmbiguousJsonError(f"The number {text[:20]}... has {len(text):,} digits.")
    return int(text)


DECODER = strict_decoder(_bounded)


def _object(value: object, where: str) -> Fields:
    if not isinstance(value, dict):
        kind = {list: "an array", str: "text", type(None): "null"}.get(type(value), "a number")
        fix = 'A row is an object with fields, such as {"prompt": "...", "completion": "..."}.'
        raise DataError(f"Cannot use {where} as a row.", found=f"It is {kind}.", fix=fix)
    return value


def read_parquet(path: Path) -> Iterator[tuple[int, Fields]]:
    import datasets  # slow to import, and most runs read JSON Lines

    with open(path, "rb") as file:
        head = file.read(64)
    if not head.startswith(b"PAR1"):
        kind, fix = identify_by_signature(head) or ("It does not begin with PAR1.", "")
        raise DataError(f"Cannot read {path} as Parquet.", found=kind, fix=fix)
    try:
        # streaming: the file is read in place, not copied into a cache
        rows = datasets.load_dataset(
            "parquet",
            data_files=str(path.resolve()),
            split="train",
            streaming=True,
            batch_size=PART_ROWS,
        )
        yield from _rows(rows)
    except Exception as problem:  # pyarrow and datasets raise a dozen unrelated classes
        raise DataError(f"Cannot read {path} as Parquet.", found=_first_lines(problem)) from problem


def read_data_set(where: str) -> Iterator[tuple[int, Fields]]:
    rows = open_data_set(where)
    try:
        yield from _rows(rows)
    except Exception as problem:  # see open_data_set
        raise _no_data_set(where, problem) from problem


def _check_one_kind(folder: Path) -> None:
    """Refuse a folder with several types of files: datasets would read one and drop the others."""
    suffixes = {path.suffix for path in folder.iterdir() if path.suffix in READERS}
    suffixes -= {".json"}  # a description of the rows
    if len(suffixes) > 1:
        patterns = " or ".join(f"'{folder}/*{suffix}'" for suffix in sorted(suffixes))
        raise DataError(
            f"Cannot read the folder {folder}.",
            found=f"It holds files of several kinds: {', '.join(sorted(suffixes))}.",
            fix=f"Select files of one kind with a pattern: {patterns}; data.train takes several.",
        )


def open_data_set(where: str) -> Any:
    """Return a data set, mapped from the cache of Hugging Face and downloaded if needed."""
    import datasets

    place, *parts = where.split(":")
    if Path(place).is_dir():
        _check_one_kind(Path(place))
    name, _, revision = place.partition("@") if not Path(place).is_dir() else (place, "", "")
    split = parts[-1] if parts else "train"
    config = parts[0] if len(parts) == 2 else None
    try:
        if (Path(place) / "state.json").is_file():  # of Dataset.save_to_disk
            if parts:
                raise DataError("It is one data set, without splits or configurations.")
            return datasets.load_from_disk(place)
        return datasets.load_dataset(name, config, split=split, revision=revision or None)
    except Exception as problem:  # network, hub, arrow and format errors share no base class
        raise _no_data_set(where, problem) from problem


def _no_data_set(where: str, problem: Exception) -> DataError:
    if (folder := Path(where.partition(":")[0])).is_dir():
        return DataError(
            f"Cannot load the data set '{where}'.",
            found=_first_lines(problem),
            fix="Give a folder of data files, or of Dataset.save_to_disk, or files by a pattern "
            f"such as '{folder}/*{_commonest_suffix(folder)}'.",
        )
    return DataError(
        f"Cannot load the data set '{where}'.",
        found=f"There is no such file, and loading a data set failed: {_first_lines(problem)}",
        fix='A data set is named "org/name", "org/name:split" or "org/name:config:split".',
    )


def _commonest_suffix(folder: Path) -> str:
    suffixes = [path.suffix for path in folder.iterdir() if path.suffix in READERS]
    return max(suffixes, key=suffixes.count, default=".jsonl")


def _rows(rows: Any) -> Iterator[tuple[int, Fields]]:
    """Yield the rows of a data set, with undecoded media and class names for class numbers."""
    import datasets

    features = dict(rows.features or {})
    for name, feature in features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            # decoded later, because errors can then name the row
            rows = rows.cast_column(name, type(feature)(decode=False))
    for number, row in enumerate(rows, start=1):
        yield number, _with_class_names(_without_nested_nulls(row), features)


def _without_nested_nulls(row: Fields) -> Fields:
    """Drop nulls in nested fields, because Arrow gives each struct the keys of all rows."""

    def cleaned(value: object) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if item is not None}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return {key: cleaned(value) for key, value in row.items()}


def _with_class_names(row: Fields, features: Mapping[str, object]) -> Fields:
    """Replace class numbers with their names; a number out of range stays."""

    def name(value: object, feature: object) -> Any:
        if isinstance(value, list):
            return [name(item, getattr(feature, "feature", None)) for item in value]
        names = getattr(feature, "names", ())
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value

    return {key: name(value, features.get(key)) for key, value in row.items()}


def _first_lines(problem: BaseException) -> str:
    while problem.__cause__ is not None:  # "An error occurred while generating the dataset"
        problem = problem.__cause__
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(problem).__name__


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Fields]]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}
