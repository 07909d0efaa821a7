"""Durable state of a training server: JSON documents in SQLite, each with its owner.

A method returns after its write is on the disk: SQLite syncs its write-ahead log at each commit.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peftkit.errors import OutputError
from peftkit.files.disk import is_disk_full
from peftkit.files.strict_json import Json

FILE = "server.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL,
    parent TEXT NOT NULL, body TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (kind, id));
CREATE INDEX IF NOT EXISTS of_parent ON documents (kind, parent);
CREATE INDEX IF NOT EXISTS of_owner ON documents (kind, owner);
"""
DATA = ("files", "jobs", "checkpoints", "tinker/weights")
"""Subfolders with data of clients, which the store describes."""


class StoreError(OutputError):
    """The store is not writable at present, for example because its disk is full."""


class Store:
    """Documents by kind and id. Thread-safe.

    Args:
        folder: Folder of the server; created if needed.

    Attributes:
        lock: Held by a check and the write that it allows.

    Raises:
        OutputError: The folder is not writable, or another server uses it.
        StoreError: Raised by each method if its write failed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            problem = _missing(folder)
            self._database = sqlite3.connect(
                folder / FILE, isolation_level=None, check_same_thread=False, timeout=1.0
            )
            self._database.executescript(
                "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
                + SCHEMA
            )
            problem = problem or self._damage()
        except sqlite3.OperationalError as error:
            is_locked = "locked" in str(error)
            raise OutputError(
                f"the server cannot store its state in {folder}",
                found="Another server uses the folder." if is_locked else str(error),
                fix="Stop that server, or set another folder with --train.",
            ) from None
        except OSError as error:
            raise OutputError(
                f"the server cannot store its state in {folder}",
                found=str(error),
                fix="Set another folder with --train.",
            ) from None
        except (sqlite3.Error, UnicodeDecodeError) as error:
            problem = str(error)
        if problem:
            self._database.close()
            raise OutputError(
                f"the server's state in {folder / FILE} is damaged.",
                found=problem,
                fix="Restore the file from a backup, or set another folder with --train.",
            )
        self.lock = threading.RLock()

    def _damage(self) -> str:
        """Return what is wrong with the file; "": nothing. SQLite has no checksums of its pages."""
        (result,) = self._database.execute("PRAGMA integrity_check(1)").fetchone()
        if result != "ok":
            return str(result)
        rows = self._database.execute("SELECT kind, id, owner, parent, body, digest FROM documents")
        for *parts, digest in rows:
            if digest != _digest(*parts):
                return f"{' '.join(parts[:-1])[:80]} does not match its digest."
        return ""

    def close(self) -> None:
        with self.lock:
            self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all writes of the context, or none."""
        with self.lock:
            if self._database.in_transaction:
                yield
                return
            self._run("BEGIN IMMEDIATE")
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # a full disk ends the transaction itself
                    self._run("ROLLBACK")
                raise

    def put(self, kind: str, id: str, body: Json, *, owner: str = "", parent: str = "") -> None:
        """Write a document; replace an older one of the same kind and id."""
        values = kind, id, owner, parent, json.dumps(body)
        self._run(
            "INSERT INTO documents (kind, id, owner, parent, body, digest) "
            "VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (kind, id) DO UPDATE SET owner = excluded.owner, "
            "parent = excluded.parent, body = excluded.body, digest = excluded.digest",
            (*values, _digest(*values)),
        )

    def get(self, kind: str, id: str, owner: str | None = None) -> Json | None:
        """Return a document; None: it does not exist, or has another owner.

        Args:
            owner: None: any owner.
        """
        query = "SELECT body, owner FROM documents WHERE kind = ? AND id = ?"
        rows = self._run(query, (kind, id))
        if not rows or owner not in (None, rows[0][1]):
            return None
        body: Json = json.loads(rows[0][0])
        return body

    def existing(self, kind: str, id: str) -> Json:
        """Return a document that exists, of any owner."""
        document = self.get(kind, id)
        assert document is not None
        return document

    def owner(self, kind: str, id: str) -> str:
        """Return the owner of a document that exists."""
        query = "SELECT owner FROM documents WHERE kind = ? AND id = ?"
        return str(self._run(query, (kind, id))[0][0])

    def all(self, kind: str, owner: str | None = None, parent: str | None = None) -> list[Json]:
        """Return documents of a kind, oldest first."""
        query, values = "SELECT body FROM documents WHERE kind = ?", [kind]
        for column, value in (("owner", owner), ("parent", parent)):
            if value is not None:
                query, values = f"{query} AND {column} = ?", [*values, value]
        return [json.loads(body) for (body,) in self._run(f"{query} ORDER BY number", values)]

    def count(self, kinds: Sequence[str], owner: str) -> int:
        """Return the number of an owner's documents of some kinds."""
        marks = ", ".join("?" * len(kinds))
        query = f"SELECT COUNT(*) FROM documents WHERE kind IN ({marks}) AND owner = ?"
        return int(self._run(query, (*kinds, owner))[0][0])

    def total(self, kind: str, owner: str, field: str) -> int:
        """Return the sum of a numeric field over an owner's documents of a kind."""
        query = "SELECT SUM(json_extract(body, ?)) FROM documents WHERE kind = ? AND owner = ?"
        return int(self._run(query, (f"$.{field}", kind, owner))[0][0] or 0)

    def delete_oldest(self, kind: str, owner: str, number: int) -> None:
        """Remove an owner's oldest documents of a kind."""
        oldest = "SELECT number FROM documents WHERE kind = ? AND owner = ? ORDER BY number LIMIT ?"
        query = f"DELETE FROM documents WHERE number IN ({oldest})"
        self._run(query, (kind, owner, number))

    def delete(self, kind: str, id: str) -> None:
        """Remove a document if it exists."""
        self._run("DELETE FROM documents WHERE kind = ? AND id = ?", (kind, id))

    def discard(self, documents: Sequence[tuple[str, str]], remove: Callable[[], None]) -> None:
        """Remove documents, by kind and id, and then their files; on a full disk, files first.

        Args:
            remove: Removes the files.
        """

        def delete() -> None:
            with self.transaction():
                for kind, id in documents:
                    self.delete(kind, id)

        try:
            delete()
        except StoreError:
            remove()  # makes room for the write
            delete()
        else:
            remove()

    def _run(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Return the rows of a query."""
        try:
            with self.lock:
                return self._database.execute(query, values).fetchall()
        except sqlite3.OperationalError as problem:  # other sqlite errors are bugs
            raise StoreError(
                "the server cannot store its state.",
                found=str(problem),
                fix="Check the disk of the server's folder.",
            ) from None


def _missing(folder: Path) -> str:
    """Return a problem if a folder has data of clients, but no store, or an empty file."""
    path = folder / FILE
    if path.exists() and path.stat().st_size:
        return ""
    used = [name for name in DATA if (folder / name).is_dir() and any((folder / name).iterdir())]
    return f"The file is missing or empty, but {', '.join(used)} has data." if used else ""


def _digest(*parts: str) -> str:
    """Return a hash of the columns of a row."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@contextmanager
def full_disk_as_store_error() -> Iterator[None]:
    """Raise a full disk as a StoreError, after which work is retried."""
    try:
        yield
    except Exception as problem:
        if isinstance(problem, StoreError) or not is_disk_full(problem):
            raise
        raise StoreError("the server's disk is full.", found=str(problem)) from problem


def new_id(prefix: str) -> str:
    """Return a random id, such as "file-3f0c...", which is also a valid file name."""
    return prefix + secrets.token_hex(12)
