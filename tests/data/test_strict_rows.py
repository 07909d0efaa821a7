"""Text files are read strictly: every error has file, line, and column where there is one."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from peftkit.data.load import Record, read_records
from peftkit.errors import DataError

ROW = '{"text": "a"}\n'


def read(tmp_path: Path, name: str, content: str | bytes) -> list[Record]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_records(str(path))


def refused(tmp_path: Path, name: str, content: str | bytes) -> str:
    with pytest.raises(DataError) as caught:
        read(tmp_path, name, content)
    return str(caught.value)


def test_every_row_keeps_file_and_line(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.jsonl", '{"text": "a"}\n\n  \n{"text": "é"}')
    assert rows == [
        Record({"text": "a"}, f"{tmp_path}/a.jsonl:1"),
        Record({"text": "é"}, f"{tmp_path}/a.jsonl:4"),
    ]


def test_an_array_keeps_the_number_of_each_element(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.json", '[\n {"text":\n "a"}, {"text": "b"}\n]\n')
    assert [(row.fields["text"], row.source[-2:]) for row in rows] == [("a", ":1"), ("b", ":2")]


def test_csv_keeps_the_line_where_a_row_begins(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.csv", 'prompt,completion\n"one\ntwo",3\n\n"a ""b""",\n')
    assert [row.fields for row in rows] == [
        {"prompt": "one\ntwo", "completion": "3"},
        {"prompt": 'a "b"', "completion": ""},
    ]
    assert [row.source.rpartition(":")[2] for row in rows] == ["2", "5"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "prompt\tcompletion\na, b\tc\n"),
        ("a.csv", "prompt\tcompletion\na, b\tc\n"),
        ("a.csv", 'prompt;completion\n"a, b";c\n'),
    ],
)
def test_cells_may_be_separated_by_tabs_and_semicolons(
    tmp_path: Path, name: str, content: str
) -> None:
    (row,) = read(tmp_path, name, content)
    assert row.fields == {"prompt": "a, b", "completion": "c"}


def test_csv_cells_may_be_long(tmp_path: Path) -> None:
    assert len(read(tmp_path, "a.csv", "text\n" + "a" * 200_000)[0].fields["text"]) == 200_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, name: str) -> None:
    content = {"a.jsonl": ROW, "a.json": f"[{ROW}]", "a.csv": "text\na\n"}[name]
    assert read(tmp_path, name, b"\xef\xbb\xbf" + content.encode())[0].fields == {"text": "a"}


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (ROW * 6 + '{"text": "a"\n', "a.jsonl:7:14 as JSON", "Expecting ',' delimiter"),
        (ROW + '{"text": "a"} {"text": "b"}\n', "a.jsonl:2:15 as JSON", "more after the end"),
        (ROW + '{"text": "a", "text": "b"}\n', "a.jsonl:2.", "'text' is given twice"),
        (ROW + '{"text": {"a": 1, "b": {"c": 1, "c": 2}}}', "a.jsonl:2.", "'c' is given twice"),
        ('{"text": NaN}\n', "a.jsonl:1.", "NaN is not a JSON number"),
        ('{"text": 1e999}\n', "a.jsonl:1.", "1e999 is out of range"),
        ('{"text": ' + "9" * 5_000 + "}", "a.jsonl:1.", "has 5,000 digits"),
        (ROW + '"text"\n', "a.jsonl:2 as a row", "It is text."),
        (ROW + "[1]\n", "a.jsonl:2 as a row", "It is an array."),
        ("[" * 100_000, "as JSON Lines", "It holds a JSON array."),
        (ROW + '{"a":' * 100_000, "a.jsonl:2.", "nested too deep"),
        ("[\n" + ROW + "]", "as JSON Lines", "It holds a JSON array."),
        (ROW.encode() + b'{"text": "caf\xe9"}\n', "a.jsonl:2:14.", "0xe9 is not UTF-8"),
        (ROW.encode() + b'{"text": "a\x00"}\n', "a.jsonl:2:12.", "NUL byte"),
        (ROW.encode("utf-16"), "a.jsonl.", "It is UTF-16"),
        ("", "a.jsonl.", "It is empty."),
        ("<!DOCTYPE html>\n<html>404", "a.jsonl.", "It is an HTML page."),
        ("version https://git-lfs.github.com/spec/v1\noid x", "a.jsonl.", "git-lfs pointer"),
        (gzip.compress(ROW.encode(), mtime=0), "a.jsonl.", "compressed with gzip"),
        (b"PK\x03\x04rest", "a.jsonl.", "zip archive"),
        (b"PAR1rest", "a.jsonl.", "Parquet"),
        (b"\x80\x04\x95rest", "a.jsonl.", "pickle"),
    ],
)
def test_a_broken_line_is_named_with_its_place(
    tmp_path: Path, content: str | bytes, place: str, words: str
) -> None:
    said = refused(tmp_path, "a.jsonl", content)
    assert place in said.splitlines()[0]
    assert words in said


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (ROW * 2, "as a JSON array", "It holds JSON Lines"),
        ('{"rows": [1]}', "as a JSON array", "holds something else"),
        ('[{"text": "a"}]\n\n3', "as a JSON array", "more than one value"),
        ('[\n{"text": "a"},\n{"text": b}]', "a.json:3:10 as JSON", "Expecting value"),
        ('[{"text": "a"}\n{"text": "b"}]', "a.json:2:1 as JSON", "Expecting ',' delimiter"),
        ('[{"text": "a"},\n{"a": 1, "a": 2}]', "a.json", "'a' is given twice"),
        ('[{"text": "a"},\n\n 3]', "a.json:2 as a row", "It is a number."),
        ("[]", "a.json.", "It holds no rows."),
    ],
)
def test_a_broken_array_is_named_with_its_place(
    tmp_path: Path, content: str, place: str, words: str
) -> None:
    said = refused(tmp_path, "a.json", content)
    assert place in said.splitlines()[0]
    assert words in said


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        ("a,b\n1,2\n1,2,3\n", "a.csv:3.", "3 cells, the header 2"),
        ("a,b\n1\n", "a.csv:2.", "1 cells, the header 2"),
        ("a,a\n1,2\n", "the header of", "'a' is given twice"),
        ("a,\n1,2\n", "the header of", "A column has no name"),
        ('a\n"1\n', "as CSV", "unexpected end"),
        ("a,b\n", "a.csv.", "It holds no rows."),
    ],
)
def test_a_broken_csv_is_named_with_its_place(
    tmp_path: Path, content: str, place: str, words: str
) -> None:
    said = refused(tmp_path, "a.csv", content)
    assert place in said.splitlines()[0]
    assert words in said
