"""The store of a training server: durable when a call returns, visible to the owner only."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from typing import Any

import pytest

from peftkit.errors import OutputError
from peftkit_server.store import FILE, Store, new_id
from tests.helpers.command_line import environment


def test_documents_have_owners_and_parents_and_keep_their_order(tmp_path):
    store = Store(tmp_path)
    for number in (3, 1, 2):
        store.put("job", f"j{number}", {"n": number}, owner="ann" if number < 3 else "bob")
    store.put("job", "j3", {"n": 33}, owner="bob")  # keeps its position
    store.put("checkpoint", "c1", {"step": 4}, parent="j1")
    assert store.all("job") == [{"n": 33}, {"n": 1}, {"n": 2}]
    assert store.all("job", "ann") == [{"n": 1}, {"n": 2}]
    assert store.all("checkpoint", parent="j1") == [{"step": 4}]
    assert store.get("job", "j1", "ann") == store.get("job", "j1") == {"n": 1}
    assert store.get("job", "j1", "bob") is None
    assert store.get("file", "j1") is None
    assert store.owner("job", "j3") == "bob"
    store.delete("job", "j1")
    assert store.get("job", "j1") is None


def test_a_transaction_is_written_whole_or_not_at_all(tmp_path):
    store = Store(tmp_path)

    def fails() -> None:
        with store.transaction():
            store.put("job", "j", {})
            store.put("event", "e", {"message": "begun"}, parent="j")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert store.all("job") == store.all("event", parent="j") == []
    with store.transaction():
        store.put("job", "j", {})
        with store.transaction():  # nested, as in a called function
            store.put("event", "e", {"message": "begun"}, parent="j")
    assert store.all("event", parent="j") == [{"message": "begun"}]


def test_a_full_disk_is_told_and_costs_what_did_not_fit(tmp_path):
    store = Store(tmp_path)
    store.put("job", "old", {"n": 1})
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages + 1}")

    def write() -> None:
        with store.transaction():
            store.put("job", "small", {})
            store.put("job", "large", {"text": "x" * 100_000})

    with pytest.raises(OutputError, match=r"(?s)cannot store its state.*disk is full"):
        write()
    assert store.all("job") == [{"n": 1}]
    with store.transaction():
        store.put("job", "small", {"n": 2})
    store.close()
    assert Store(tmp_path).all("job") == [{"n": 1}, {"n": 2}]


def test_what_comes_after_a_commit_that_failed_is_written(tmp_path):
    store = Store(tmp_path)
    database = store._database

    class Fails:
        def __getattr__(self, name: str) -> Any:
            return getattr(database, name)

        def execute(self, query: str, *values: Any) -> Any:
            if query == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return database.execute(query, *values)

    def write(id: str) -> None:
        with store.transaction():
            store.put("job", id, {"id": id})

    store._database = Fails()  # type: ignore[assignment]
    with pytest.raises(OutputError, match="I/O"):
        write("lost")
    store._database = database
    write("kept")
    store.close()
    assert Store(tmp_path).all("job") == [{"id": "kept"}]


def test_a_store_that_is_closed_is_no_broken_disk(tmp_path):
    store = Store(tmp_path)
    store.close()
    with pytest.raises(sqlite3.ProgrammingError):
        store.put("job", "late", {})


def test_threads_write_side_by_side(tmp_path):
    store = Store(tmp_path)

    def write(name: str) -> None:
        for number in range(20):
            store.put("event", f"{name}{number}", {"n": number}, parent=name)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "abc":
        assert [event["n"] for event in store.all("event", parent=name)] == list(range(20))


@pytest.mark.smoke
def test_what_a_killed_server_wrote_is_there(tmp_path):
    program = (
        "import os, pathlib, sys; from peftkit_server.store import Store\n"
        "store = Store(pathlib.Path(sys.argv[1])); store.put('job', 'j', {'step': 7})\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], env=environment(), check=False)
    assert Store(tmp_path).get("job", "j") == {"step": 7}


def test_a_folder_belongs_to_one_server(tmp_path):
    first = Store(tmp_path)
    with pytest.raises(OutputError, match="Another server uses the folder"):
        Store(tmp_path)
    first.close()
    Store(tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot store its state"):
        Store(tmp_path / "file")


def test_ids_are_names_of_files():
    assert new_id("file-").removeprefix("file-").isalnum()
    assert new_id("file-") != new_id("file-")


def test_a_damaged_store_is_named(tmp_path):
    with closing(Store(tmp_path)) as store:
        for number in range(40):
            store.put("file", f"file-{number}", {"bytes": number, "name": "rows"}, owner="ann")
            store.put("event", f"e-{number}", {"message": f"entry {number}"}, parent="j")
    path = tmp_path / FILE
    undamaged = path.read_bytes()
    for text in (b'"bytes": 17', b"entry 23", b"ann", b"SQLite format", b"documents"):
        data = bytearray(undamaged)
        data[data.index(text) + len(text) - 1] ^= 1
        path.write_bytes(data)
        with pytest.raises(OutputError, match=rf"{FILE} is damaged") as damaged:
            Store(tmp_path)
        assert "backup" in damaged.value.fix
    path.write_bytes(undamaged[: len(undamaged) // 2])
    with pytest.raises(OutputError, match="is damaged"):
        Store(tmp_path)
    path.write_bytes(undamaged)
    with closing(Store(tmp_path)) as store:
        assert store.count(("file",), "ann") == 40
        assert store.total("file", "ann", "bytes") == sum(range(40))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file-1.jsonl").touch()
    path.write_bytes(b"")  # a new store would not know the files, and remove them
    with pytest.raises(OutputError, match="files has data"):
        Store(tmp_path)
