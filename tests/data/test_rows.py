"""Encoded rows in files: the same rows as in memory, made once, told of when wrong."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from peftkit.data import readers as load
from peftkit.data import records
from peftkit.data.encode import BEYOND, NOTHING, DocumentEncoder, Encoder
from peftkit.data.format import parse
from peftkit.data.pack import IGNORE
from peftkit.data.records import read_records
from peftkit.data.rows import cache as data_rows
from peftkit.data.rows.cache import cache_folder, encoded
from peftkit.data.rows.columns import columns_of, labels_of, row_digest
from peftkit.errors import DataError, RunError
from tests.helpers.command_line import environment
from tests.helpers.folders import write_rows


def write(path: Path, number: int) -> Path:
    rows = [
        {"instruction": f"Say {n}.", "output": "yes " * (1 + n % 41), "note": n}
        for n in range(number)
    ]
    text = "".join(json.dumps(row) + "\n" + "\n" * (n % 9 == 0) for n, row in enumerate(rows))
    path.write_text(text)
    return path


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> DocumentEncoder:
    return DocumentEncoder(tokenizer, None, "auto", 100)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def in_memory(path: Path, tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    """As rows were made before they were stored."""
    plain = Encoder(tokenizer)
    parsed = parse(read_records(str(path)), "auto", where=str(path))
    return [plain.encode(example) for example in parsed.examples]


def test_stored_rows_are_the_encoders(tmp_path, encoder, tokenizer):
    path = write(tmp_path / "a.jsonl", 83)
    rows, plain = encoded(str(path), encoder), in_memory(path, tokenizer)
    short = [row for row in plain if len(row.input_ids) <= 100]
    kept = {row.source: row for row in rows}
    assert all(kept[row.source] == row for row in short)
    assert rows.num_read == 83
    assert rows.counts["cut"] == len(plain) - len(short) > 0
    assert max(rows.num_tokens) == 100
    assert list(rows.num_tokens) == [len(row.input_ids) for row in rows]
    assert rows.counts["targets"] == sum(row.num_targets for row in rows)
    assert rows.unused == ["note"]
    assert rows[-1] == rows[82]
    assert [row.source for row in rows[1:9:3]] == [rows[n].source for n in (1, 4, 7)]
    assert rows[5] is rows[5]


def test_a_second_start_encodes_nothing(tmp_path, encoder, tokenizer, monkeypatch):
    path = write(tmp_path / "a.jsonl", 9)
    first = encoded(str(path), encoder)
    elsewhere = path.rename(tmp_path / "b.jsonl")

    def never(*args: Any) -> Any:
        raise AssertionError("it encodes")

    monkeypatch.setattr(data_rows, "blocks", never)
    again = encoded(str(elsewhere), encoder)
    assert [row.input_ids for row in again] == [row.input_ids for row in first]
    assert again[0].source == f"{elsewhere}:1"
    for changed in (DocumentEncoder(tokenizer, None, "auto", 99), encoder):
        if changed is encoder:
            elsewhere.write_text(elsewhere.read_text().replace("Say 3", "Say 7"))
        with pytest.raises(AssertionError, match="it encodes"):
            encoded(str(elsewhere), changed)


def test_a_torn_file_of_the_cache_is_made_again(tmp_path, encoder):
    path = write(tmp_path / "a.jsonl", 9)
    before = list(encoded(str(path), encoder))
    (folder,) = cache_folder().glob("[!.]*")
    rows = folder / "rows.arrow"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:200])
    assert list(encoded(str(path), encoder)) == before
    assert rows.read_bytes() == whole


def test_a_flipped_bit_in_the_cache_is_detected(tmp_path, encoder):
    path = write(tmp_path / "a.jsonl", 9)
    before = list(encoded(str(path), encoder))
    (folder,) = cache_folder().glob("[!.]*")
    rows, facts = folder / "rows.arrow", folder / "facts.json"
    whole, written = rows.read_bytes(), facts.read_text()
    num_refused = 0
    for position in range(3, len(whole), max(1, len(whole) // 97)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        rows.write_bytes(flipped)
        try:
            assert list(encoded(str(path), encoder)) == before
        except DataError as error:
            num_refused += "its encoded row is damaged" in str(error)
            assert list(encoded(str(path), encoder)) == before  # encoded anew
        rows.write_bytes(whole)
        facts.write_text(written)
    assert num_refused > 10


def test_numbers_and_lists_have_the_digest_of_what_is_read_back(tmp_path):
    @dataclass(frozen=True)
    class Loose:
        input_ids: tuple[int, ...]
        weight: float
        words: tuple[str, ...]
        source: str

    row: Any = Loose((3, 4), 1, ["a", "b"], "x:1")  # type: ignore[arg-type]
    columns = columns_of(Loose)
    read, digest = columns.row(columns.batch("x", [row]), 0, "x:1")
    assert digest == row_digest(row) == row_digest(read)


@pytest.mark.parametrize("kind", ["csv", "json", "folder"])
def test_rows_of_any_file_are_encoded_once_by_processes(kind, tmp_path, encoder, monkeypatch):
    import datasets

    rows = [{"prompt": f"say {n}", "completion": "yes, " * (n % 7 + 1)} for n in range(50)]
    (tmp_path / "set").mkdir()
    table = datasets.Dataset.from_list(rows)
    where = str(tmp_path / f"rows.{kind}")
    if kind == "csv":
        table.to_csv(where)
    elif kind == "json":
        (tmp_path / "rows.json").write_text(json.dumps(rows))
    else:
        where = str(tmp_path / "set") if kind == "folder" else where
        table.to_parquet(tmp_path / "set" / "train.parquet" if kind == "folder" else where)
    monkeypatch.setattr(records, "PART_ROWS", 7)
    alone = encoded(where, encoder, processes=1)
    for folder in cache_folder().glob("[!.]*"):
        shutil.rmtree(folder)
    together = encoded(where, encoder, processes=2)
    assert len(alone) == 50
    assert list(together) == list(alone)
    monkeypatch.setattr(data_rows, "blocks", lambda *args: pytest.fail("it encodes"))
    assert encoded(where, encoder).fingerprint == alone.fingerprint


ENDLESS = """
import os, pathlib, socket, sys, time
from peftkit.data.rows import workers as rows
from peftkit.data.pack import Row

def work(part):
    (pathlib.Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep(600)

rows._encode_part = work
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
encoder = type("Encoder", (), {"kind": Row})()
list(rows._in_processes(iter(range(4)), "a.jsonl", encoder, 2))
"""


@pytest.mark.covers("peftkit")
@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="encodes in one process")
def test_processes_end_with_one_that_is_killed_and_free_its_port(tmp_path):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    parent = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as told:
        port = int(told.readline())
    while len(children := [int(path.name) for path in tmp_path.glob("[0-9]*")]) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    try:
        until = time.monotonic() + 30
        while any(map(_is_alive, children)) and time.monotonic() < until:
            time.sleep(0.05)
        socket.create_server(("127.0.0.1", port)).close()
    finally:
        for child in filter(_is_alive, children):
            os.kill(child, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_killed_worker_process_is_one_message(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(DocumentEncoder, "read", lambda *args: os._exit(9))
    with pytest.raises(RunError, match="was killed"):
        encoded(str(write(tmp_path / "a.jsonl", 9)), encoder, processes=2)
    assert not list(cache_folder().glob("[!.]*"))


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path, encoder, monkeypatch):
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(data_rows, "blocks", full)
    with pytest.raises(RunError, match=r"No space left(.|\n)*HF_HOME"):
        encoded(str(write(tmp_path / "a.jsonl", 9)), encoder)
    assert not list(cache_folder().glob("[!.]*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_rows_are_named_by_line_and_counted(tmp_path, encoder, processes, monkeypatch):
    monkeypatch.setattr(load, "PART_BYTES", 700)
    monkeypatch.setattr(DocumentEncoder, "at_once", 10)
    path = write(tmp_path / "a.jsonl", 83)
    lines = path.read_text().splitlines()
    for number in (40, 77):
        lines[number - 1] = json.dumps({"instruction": 3, "output": "x"})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"2 of 8\d rows(.|\n)*a\.jsonl:40(.|\n)*a\.jsonl:77"):
        encoded(str(path), encoder, processes=processes)
    assert not list(cache_folder().glob("[!.]*"))
    lines[39] = '{"instruction": '
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:40"):
        encoded(str(path), encoder, processes=processes)


def test_dropped_rows_keep_their_source(tmp_path, tokenizer):
    rows = [{"prompt": "a" * 300, "completion": "b"}, {"prompt": "a", "completion": " "}]
    rows += [{"prompt": f"a{n % 2}", "completion": "b"} for n in range(4)]
    path = tmp_path / "a.jsonl"
    write_rows(path, rows)
    rows = encoded(str(path), DocumentEncoder(tokenizer, None, "auto", 20))
    assert rows.dropped(BEYOND) == [f"{path}:1"]
    assert rows.dropped(NOTHING) == [f"{path}:2"]
    assert [row.source for row in rows] == [f"{path}:{n}" for n in (3, 4, 5, 6)]
    assert rows.num_duplicates == 2
    assert rows.num_shared(rows) == 4


def test_labels_are_tokens_between_their_bounds():
    assert labels_of((5, 6, 7, 8), [1, 2, 3, 4]) == (IGNORE, 6, IGNORE, 8)
    assert labels_of((5, 6), []) == (IGNORE, IGNORE)
