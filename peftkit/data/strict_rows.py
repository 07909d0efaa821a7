"""Rows out of text files: JSON Lines, a JSON array, CSV; each with the line it stands on.

Strict, because a row that is read half is worse than one that is refused: UTF-8 only, no duplicate
keys, no NaN, no ragged CSV. What is not text at all is named for what it is.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peftkit.errors import DataError
from peftkit.files.strict_json import AmbiguousJsonError, strict_decoder

Fields = dict[str, Any]
PART_BYTES = 1 << 20

_JSONL_FIX = "A .jsonl file holds one complete JSON object per line."
_TO_UTF8 = "Convert it: iconv -f {} -t UTF-8 {} > utf8{}"

# the first bytes of files that are often given by mistake: (bytes, what it is, what to do)
_SIGNATURES = (
    (b"\x1f\x8b", "It is compressed with gzip.", "Unpack it first: gunzip FILE."),
    (b"PK\x03\x04", "It is a zip archive.", "Unpack it and give the file inside."),
    (b"PAR1", "It is a Parquet file.", "Rename it to .parquet."),
    (b"\x80\x04", "It is a pickle; peftkit never opens one.", "Save the rows as JSON Lines."),
    (b"\x80\x05", "It is a pickle; peftkit never opens one.", "Save the rows as JSON Lines."),
    (
        b"version https://git-lfs",
        "It is a git-lfs pointer, not the file itself.",
        "Fetch the file: git lfs pull.",
    ),
)


def named_for_what_it_is(head: bytes) -> tuple[str, str] | None:
    """Return (found, fix) where the first bytes belong to something that holds no rows of text."""
    if not head.strip():
        return "It is empty.", "Give a file with at least one row."
    for signature, found, fix in _SIGNATURES:
        if head.startswith(signature):
            return found, fix
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "It is an HTML page.", "Download the file itself, not the page that shows it."
    return None


def read_jsonl(
    path: Path, *, start: int = 0, stop: int | None = None, line: int = 1
) -> Iterator[tuple[int, Fields]]:
    """Yield (line, object) of a JSON Lines file; blank lines are skipped.

    Args:
        start, stop: Bytes between which whole lines are read.
        line: Number of the first of these.
    """
    left = sys.maxsize if stop is None else stop - start
    with open(path, "rb") as file:
        if start == 0:
            _check_text(path, file.read(4096))
        file.seek(start)
        for number, raw in enumerate(file, start=line):
            left -= len(raw)
            if left < 0:
                break
            text = _decoded(path, raw, number)
            if not text.strip():
                continue
            if number == 1 and text.lstrip().startswith("["):
                raise DataError(
                    f"Cannot read {path} as JSON Lines.",
                    found="It holds a JSON array.",
                    fix="Rename it to .json, or write one object per line.",
                )
            yield number, _object(_parsed(text, f"{path}:{number}"), f"{path}:{number}")


def line_parts(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, last byte, number of the first line) of parts of a file, whole lines."""
    line, start = 1, 0
    with open(path, "rb") as file:
        while (chunk := file.read(PART_BYTES)) or start == 0:
            rest = b"" if chunk.endswith(b"\n") else file.readline()
            stop = start + len(chunk) + len(rest)
            yield start, stop, line
            if not chunk:  # an empty file: whoever reads it says so
                break
            line += chunk.count(b"\n") + rest.count(b"\n")
            start = stop


def read_json(path: Path) -> Iterator[tuple[int, Fields]]:
    """Yield (number from 1, object) of a JSON file that holds an array of objects."""
    raw = path.read_bytes()
    _check_text(path, raw[:4096])
    text = _decoded(path, raw, 1)
    rows, end = _decode(text, len(text) - len(text.lstrip()), str(path), skip_lines=True)
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

    Where the header is one cell for commas, semicolons or tabs in it are what separates cells.
    """
    with open(path, "rb") as file:
        _check_text(path, file.read(4096))
    limit = csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 KiB
    try:
        delimiter = _delimiter(path)
        reader = csv.reader(_csv_lines(path), strict=True, delimiter=delimiter)
        header = next(reader)
        _check_header(path, header)
        line = reader.line_num + 1  # a cell may span lines: a row begins after the last one's end
        for cells in reader:
            if cells and len(cells) != len(header):
                raise DataError(
                    f"Cannot read {path}:{line}.",
                    found=f"The row has {len(cells)} cells, the header {len(header)}.",
                    fix="Put cells that hold line breaks or what separates cells in double quotes.",
                )
            if cells:
                yield line, dict(zip(header, cells, strict=True))
            line = reader.line_num + 1
    except csv.Error as problem:
        where = f"{path}:{reader.line_num}"
        raise DataError(f"Cannot read {where} as CSV.", found=str(problem)) from None
    finally:
        csv.field_size_limit(limit)


def _delimiter(path: Path) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    header = next(csv.reader(_csv_lines(path), strict=True))
    if len(header) > 1:
        return ","
    return next((sign for sign in ";\t" if sign in header[0]), ",")


def _csv_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, however they end."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            for line in file:
                if "\0" in line:
                    raise UnicodeError
                yield line
        except UnicodeError:
            _decoded(path, path.read_bytes(), 1)  # says where
            raise


def _check_header(path: Path, header: list[str]) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice or "" in header:
        found = f"The column {twice[0]!r} is given twice." if twice else "A column has no name."
        raise DataError(f"Cannot use the header of {path}.", found=found)


def _check_text(path: Path, head: bytes) -> None:
    what = named_for_what_it_is(head)
    if what is None and head.startswith((b"\xff\xfe", b"\xfe\xff")):
        what = "It is UTF-16, not UTF-8.", _TO_UTF8.format("UTF-16", path, path.suffix)
    if what is not None:
        raise DataError(f"Cannot read {path}.", found=what[0], fix=what[1])


def _decoded(path: Path, raw: bytes, line: int) -> str:
    """Decode UTF-8; `line` is the number of the first line of `raw`."""
    if line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        where = _place(raw[: problem.start].decode("utf-8"), line)
        raise DataError(
            f"Cannot read {path}:{where}.",
            found=f"The byte 0x{raw[problem.start]:02x} is not UTF-8; the file is probably Latin-1 "
            "(Windows-1252).",
            fix=_TO_UTF8.format("WINDOWS-1252", path, path.suffix),
        ) from None
    if "\0" in text:
        where = _place(text[: text.index("\0")], line)
        fix = "The file is damaged, or binary: write it again as UTF-8 text."
        raise DataError(f"Cannot read {path}:{where}.", found="There is a NUL byte.", fix=fix)
    return text


def _place(before: str, line: int) -> str:
    """Return "line:column" of what follows `before`, whose first line has the number `line`."""
    return f"{line + before.count(chr(10))}:{len(before) - before.rfind(chr(10))}"


def _parsed(line: str, where: str) -> Any:
    start = len(line) - len(line.lstrip())
    value, end = _decode(line, start, where)
    if line[end:].strip():
        rest = end + len(line[end:]) - len(line[end:].lstrip())
        words = "There is more after the end of the object."
        raise DataError(f"Cannot read {where}:{rest + 1} as JSON.", found=words, fix=_JSONL_FIX)
    return value


def _decode(text: str, at: int, where: str, *, skip_lines: bool = False) -> tuple[Any, int]:
    """Decode one JSON value at an offset; `skip_lines` when `where` lacks the line."""
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as problem:
        place = f"{problem.lineno}:{problem.colno}" if skip_lines else str(problem.pos + 1)
        fix = "" if skip_lines else _JSONL_FIX
        raise DataError(
            f"Cannot read {where}:{place} as JSON.", found=f"{problem.msg}.", fix=fix
        ) from None
    except AmbiguousJsonError as problem:
        place = f"{where}:{_place(text[:at], 1)}" if skip_lines else where
        raise DataError(f"Cannot use {place}.", found=str(problem)) from None
    except RecursionError:
        raise DataError(f"Cannot read {where}.", found="It is nested too deep.") from None


def _bounded(text: str) -> int:
    if len(text) > 400:
        raise AmbiguousJsonError(f"The number {text[:20]}... has {len(text):,} digits.")
    return int(text)


_DECODER = strict_decoder(_bounded)


def _object(value: Any, where: str) -> Fields:
    if not isinstance(value, dict):
        kind = {list: "an array", str: "text", type(None): "null"}.get(type(value), "a number")
        fix = 'A row is an object with fields, such as {"prompt": "...", "completion": "..."}.'
        raise DataError(f"Cannot use {where} as a row.", found=f"It is {kind}.", fix=fix)
    return value
