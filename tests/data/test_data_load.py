"""Files, folders and data sets are found, or the message says what was found instead."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from peftkit.data.load import read_records
from peftkit.data.survey import survey
from peftkit.errors import DataError


def refused(where: str) -> str:
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


def test_parquet_rows_lose_the_nulls_that_columns_fill_in(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet")
    rows = read_records(str(tmp_path / "a.parquet"))
    assert [row.fields for row in rows] == [
        {"messages": [{"role": "user", "content": "q", "name": "x"}], "extra": None},
        {"messages": [{"role": "assistant", "content": "a"}], "extra": "e"},
    ]
    assert [row.source for row in rows] == [f"{tmp_path}/a.parquet:{n}" for n in (1, 2)]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path)
    path.write_bytes(path.read_bytes()[:200])
    assert f"Cannot read {path} as Parquet." in refused(str(path))
    path.write_text("<html>404</html>")
    assert "It is an HTML page." in refused(str(path))


def test_a_folder_is_a_data_set_with_splits(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "c"}\n')
    assert [row.fields["text"] for row in read_records(str(tmp_path))] == ["a", "b"]
    (row,) = read_records(f"{tmp_path}:test")
    assert row.fields == {"text": "c"}
    assert row.source == f"{tmp_path}:test:1"
    assert "Cannot load the data set" in refused(f"{tmp_path}:nosuchsplit")


def test_a_missing_file_is_told_with_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("{}")
    Path("notes.txt").write_text("")
    assert "Did you mean 'train.jsonl'?" in refused("trian.jsonl")
    assert "train.jsonl" in refused("other.jsonl")
    assert "Did you mean 'train.jsonl'?" in refused("train.json")
    assert "Did you mean 'train.jsonl'?" in refused("train")
    assert "'data' is not there" in refused("data/train.jsonl")


def test_an_unreachable_data_set_says_that_there_is_no_such_file_either() -> None:
    said = refused("nobody-at-all/nothing")
    assert "Cannot load the data set 'nobody-at-all/nothing'." in said
    assert "There is no such file here" in said
    assert '"org/name:config:split"' in said


def test_classes_that_a_data_set_numbers_come_by_their_names(tmp_path: Path) -> None:
    import datasets

    kind, number = datasets.ClassLabel(names=["O", "B-x"]), datasets.Value("int64")
    features = datasets.Features({"label": kind, "tags": datasets.List(kind), "n": number})
    columns = {"label": [1, -1], "tags": [[0, 1], []], "n": [0, 1]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "rows.parquet")
    first, second = read_records(str(tmp_path / "rows.parquet"))
    assert first.fields == {"label": "B-x", "tags": ["O", "B-x"], "n": 0}
    assert second.fields == {"label": -1, "tags": [], "n": 1}  # no class: as it is


def test_other_endings_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert "'.txt' says nothing about its format" in refused(str(tmp_path / "a.txt"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    assert "compressed with gzip" in refused(str(tmp_path / "a.jsonl.gz"))


def test_a_file_of_several_formats_is_told_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n')
    assert survey(str(path)).mixed == f"{path}:2 has the format prompt_completion"
    path.write_text('{"text": "a"}\n')
    assert survey(str(path)).mixed == ""
