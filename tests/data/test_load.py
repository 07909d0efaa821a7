"""Files and data sets as records: read strictly, every error with its file, line and column."""

import gzip
import sys
from pathlib import Path

import pytest

from peftkit.data.records import Record, files_of, read_records, stamp_of
from peftkit.errors import ConfigError, DataError
from peftkit.files.remote import PACKAGES

ROW = '{"text": "a"}\n'


def read(tmp_path: Path, name: str, content: str | bytes) -> list[Record]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_records(str(path))


def refused(tmp_path: Path, name: str, content: str | bytes) -> str:
    with pytest.raises(DataError) as caught:
        read(tmp_path, name, content)
    return str(caught.value)


def test_every_row_keeps_file_and_line(tmp_path):
    rows = read(tmp_path, "a.jsonl", '{"text": "a"}\n\n  \n{"text": "é"}')
    assert rows == [
        Record({"text": "a"}, f"{tmp_path}/a.jsonl:1"),
        Record({"text": "é"}, f"{tmp_path}/a.jsonl:4"),
    ]


def test_an_array_keeps_the_number_of_each_element(tmp_path):
    rows = read(tmp_path, "a.json", '[\n {"text":\n "a"}, {"text": "b"}\n]\n')
    assert [(row.fields["text"], row.source[-2:]) for row in rows] == [("a", ":1"), ("b", ":2")]


def test_csv_keeps_the_line_where_a_row_begins(tmp_path):
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
def test_tabs_and_semicolons_separate_cells(tmp_path, name, content):
    (row,) = read(tmp_path, name, content)
    assert row.fields == {"prompt": "a, b", "completion": "c"}


def test_csv_cells_may_be_long(tmp_path):
    assert len(read(tmp_path, "a.csv", "text\n" + "a" * 200_000)[0].fields["text"]) == 200_000


@pytest.mark.parametrize("index", ["", ";"])
@pytest.mark.parametrize("first", ["", "sep=;\n", '"sep=;"\r\n', "\ufeffsep=;\n"])
def test_csv_files_are_read_as_excel_and_pandas_write_them(index, first, tmp_path):
    rows = "".join(f'{n if index else ""}{index}"Add {n}; and 1";"{n + 1}"\n' for n in range(6))
    text = f"{first}{index}instruction;output\n{rows}"
    records = read(tmp_path, "a.csv", text.encode())
    expected = [{"instruction": f"Add {n}; and 1", "output": str(n + 1)} for n in range(6)]
    unnamed: list[dict[str, str]] = [{"column 1": str(n)} if index else {} for n in range(6)]
    assert [r.fields for r in records] == [a | b for a, b in zip(unnamed, expected, strict=True)]
    lines = [int(record.source.rpartition(":")[2]) for record in records]
    assert lines == [n + 2 + bool(first) for n in range(6)]


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    import datasets

    rows = [{"instruction": f"Add {n} and 1", "output": str(n + 1)} for n in range(6)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert [record.fields for record in read_records(str(tmp_path / "saved"))] == rows
    assert stamp_of(str(tmp_path / "saved")) is not None
    with pytest.raises(DataError, match="one data set, without splits"):
        read_records(f"{tmp_path / 'saved'}:test")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, name):
    content = {"a.jsonl": ROW, "a.json": f"[{ROW}]", "a.csv": "text\na\n"}[name]
    assert read(tmp_path, name, b"\xef\xbb\xbf" + content.encode())[0].fields == {"text": "a"}


BROKEN: dict[str, list[tuple[str | bytes, str, str]]] = {
    "a.jsonl": [
        (ROW * 6 + '{"text": "a"\n', "a.jsonl:7:14 as JSON", "Expecting ',' delimiter"),
        (ROW + '{"text": "a"} {"text": "b"}\n', "a.jsonl:2:15 as JSON", "more after the end"),
        (ROW + '{"text": "a", "text": "b"}\n', "a.jsonl:2.", "'text' is given twice"),
        (ROW + '{"text": {"a": 1, "b": {"c": 1, "c": 2}}}', "a.jsonl:2.", "'c' is given twice"),
        ('{"text": NaN}\n', "a.jsonl:1.", "NaN is not a JSON number"),
        ('{"text": 1e999}\n', "a.jsonl:1.", "1e999 is out of range"),
        ('{"text": ' + "9" * 5_000 + "}", "a.jsonl:1.", "has 5,000 digits"),
        (ROW + '"text"\n', "a.jsonl:2 as a row", "It is text."),
        (ROW + "[1]\n", "a.jsonl:2 as a row", "It is an array."),
        ("[" * 100_000, "a.jsonl.", "nested too deep"),
        (ROW + '{"a":' * 100_000, "a.jsonl:2.", "nested too deep"),
        ("[\n" + ROW + "3]", "a.jsonl:3:1 as JSON", "Expecting ',' delimiter"),
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
    "a.json": [
        (ROW * 2, "as a JSON array", "It holds JSON Lines"),
        ('{"rows": [1]}', "a.json:1 as a row", "It is a number."),
        ('{"rows": [], "more": []}', "as a JSON array", "holds something else"),
        ('[{"text": "a"}]\n\n3', "as a JSON array", "more than one value"),
        ('[\n{"text": "a"},\n{"text": b}]', "a.json:3:10 as JSON", "Expecting value"),
        ('[{"text": "a"}\n{"text": "b"}]', "a.json:2:1 as JSON", "Expecting ',' delimiter"),
        ('[{"text": "a"},\n{"a": 1, "a": 2}]', "a.json", "'a' is given twice"),
        ('[{"text": "a"},\n\n 3]', "a.json:2 as a row", "It is a number."),
        ("[]", "a.json.", "It holds no rows."),
    ],
    "a.csv": [
        ("a,b\n1,2\n1,2,3\n", "a.csv:3.", "3 cells, the header 2"),
        ("a,b\n1\n", "a.csv:2.", "1 cells, the header 2"),
        ("a,a\n1,2\n", "the header of", "'a' is given twice"),
        ("sep=;\na;b\n1;2\n3\n", "a.csv:4.", "1 cells, the header 2"),
        ('sep=;\na;b\n"1', "a.csv:3 as CSV", "unexpected end"),
        ('a\n"1\n', "as CSV", "unexpected end"),
        ("a,b\n", "a.csv.", "It holds no rows."),
    ],
}
"""By file name: content, its position in the message, and words of the message."""


@pytest.mark.parametrize(
    ("name", "content", "place", "words"),
    [(name, *case) for name, cases in BROKEN.items() for case in cases],
)
def test_broken_content_is_named_with_its_place(name, content, place, words, tmp_path):
    message = refused(tmp_path, name, content)
    assert place in message.splitlines()[0]
    assert words in message


def error_of(where: str) -> str:
    with pytest.raises(DataError) as caught:
        read_records(where)
    return str(caught.value)


def parquet(path: Path) -> None:
    import datasets

    rows = [
        {"messages": [{"role": "user", "content": "q", "name": "x"}], "extra": None},
        {"messages": [{"role": "assistant", "content": "a", "name": None}], "extra": "e"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(path)


def test_parquet_rows_lose_the_nulls_that_columns_fill_in(tmp_path):
    parquet(tmp_path / "a.parquet")
    rows = read_records(str(tmp_path / "a.parquet"))
    assert [row.fields for row in rows] == [
        {"messages": [{"role": "user", "content": "q", "name": "x"}], "extra": None},
        {"messages": [{"role": "assistant", "content": "a"}], "extra": "e"},
    ]
    assert [row.source for row in rows] == [f"{tmp_path}/a.parquet:{n}" for n in (1, 2)]


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path)
    path.write_bytes(path.read_bytes()[:200])
    assert f"Cannot read {path} as Parquet." in error_of(str(path))
    path.write_text("<html>404</html>")
    assert "It is an HTML page." in error_of(str(path))


def test_a_folder_is_a_data_set_with_splits(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "c"}\n')
    assert [row.fields["text"] for row in read_records(str(tmp_path))] == ["a", "b"]
    (row,) = read_records(f"{tmp_path}:test")
    assert row.fields == {"text": "c"}
    assert row.source == f"{tmp_path}:test:1"
    assert "Cannot load the data set" in error_of(f"{tmp_path}:nosuchsplit")


def test_a_missing_file_error_lists_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("{}")
    Path("notes.txt").write_text("")
    assert "Did you mean 'train.jsonl'?" in error_of("trian.jsonl")
    assert "train.jsonl" in error_of("other.jsonl")
    assert "Did you mean 'train.jsonl'?" in error_of("train.json")
    assert "Did you mean 'train.jsonl'?" in error_of("train")
    assert "'data' does not exist" in error_of("data/train.jsonl")


@pytest.mark.parametrize("url", ["s3://bucket/rows.jsonl", "https://host/a.jsonl?download=1"])
def test_urls_are_not_taken_for_paths(url, monkeypatch):
    (source,) = files_of(url)
    assert source == url
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, PACKAGES[url.partition(":")[0]], None)
        with pytest.raises(ConfigError, match="pip install"):
            read_records(source)


def test_an_unreachable_data_set_says_that_there_is_no_such_file_either():
    message = error_of("nobody-at-all/nothing")
    assert "Cannot load the data set 'nobody-at-all/nothing'." in message
    assert "There is no such file" in message
    assert '"org/name:config:split"' in message


def test_classes_that_a_data_set_numbers_come_by_their_names(tmp_path):
    import datasets

    kind, number = datasets.ClassLabel(names=["O", "B-x"]), datasets.Value("int64")
    features = datasets.Features({"label": kind, "tags": datasets.List(kind), "n": number})
    columns = {"label": [1, -1], "tags": [[0, 1], []], "n": [0, 1]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "rows.parquet")
    first, second = read_records(str(tmp_path / "rows.parquet"))
    assert first.fields == {"label": "B-x", "tags": ["O", "B-x"], "n": 0}
    assert second.fields == {"label": -1, "tags": [], "n": 1}  # no class: as it is


def test_other_endings_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    assert "'.txt' is not one of a known format" in error_of(str(tmp_path / "a.txt"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    assert "compressed with gzip" in error_of(str(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '[{"text": "a"}, {"text": "b"}]'),
        ("a.json", '{"data": [{"text": "a"}, {"text": "b"}]}'),
    ],
)
def test_arrays_are_read_as_other_tools_write_them(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    records = read_records(str(tmp_path / name))
    assert [record.fields["text"] for record in records] == ["a", "b"]


def test_a_folder_of_mixed_files_is_named_as_such(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.csv").write_text("question,answer\na,b\n")
    with pytest.raises(DataError) as refused:
        read_records(str(tmp_path))
    assert "It holds files of several kinds: .csv, .jsonl." in str(refused.value)
    assert f"'{tmp_path}/*.jsonl'" in str(refused.value)
