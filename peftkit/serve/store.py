"""What a training server must not lose: JSON documents in SQLite, each with its owner.

A call that has returned has written: the journal is a write-ahead log, synced at each commit.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peftkit.errors import OutputError

FILE = "server.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL,
    parent TEXT NOT NULL, body TEXT NOT NULL, UNIQUE (kind, id));
CREATE INDEX IF NOT EXISTS of_parent ON documents (kind, parent);
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, parent TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS entries_of ON entries (parent);
"""


class StoreError(OutputError):
    """The store cannot be written now: its disk is full, say; later it may be."""


class Store:
    """Documents by kind and id, and journals of entries; any thread may call it.

    Args:
        folder: Of the server; created if needed.

    Raises:
        OutputError: The folder cannot be written to, or another server has it.
        StoreError: Of each method: what was asked is not written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                folder / FILE, isolation_level=None, check_same_thread=False, timeout=1.0
            )
            self._database.executescript(
                "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
                + SCHEMA
            )
        except (OSError, sqlite3.Error) as problem:
            is_locked = "locked" in str(problem)
            raise OutputError(
                f"the server cannot keep its state in {folder}",
                found="Another server has it open." if is_locked else str(problem),
                fix="Stop that server, or give another folder with --train.",
            ) from None
        self._lock = threading.RLock()

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all that the context writes, or nothing."""
        with self._lock:
            if self._database.in_transaction:
                yield
                return
            self._run("BEGIN IMMEDIATE")
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # else a full disk has ended it
                    self._run("ROLLBACK")
                raise

    def put(
        self, kind: str, id: str, body: dict[str, Any], *, owner: str = "", parent: str = ""
    ) -> None:
        """Write a document, in the place of an older one with its kind and id."""
        with self._lock:
            self._run(
                "INSERT INTO documents (kind, id, owner, parent, body) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (kind, id) DO UPDATE SET owner = excluded.owner, "
                "parent = excluded.parent, body = excluded.body",
                (kind, id, owner, parent, json.dumps(body)),
            )

    def get(self, kind: str, id: str, owner: str | None = None) -> dict[str, Any] | None:
        """Return a document; None: there is none, or it is another owner's.

        Args:
            owner: None: anybody's.
        """
        query = "SELECT body, owner FROM documents WHERE kind = ? AND id = ?"
        with self._lock:
            row = self._run(query, (kind, id)).fetchone()
        if row is None or owner not in (None, row[1]):
            return None
        body: dict[str, Any] = json.loads(row[0])
        return body

    def owner(self, kind: str, id: str) -> str:
        """Return the owner of a document that exists."""
        query = "SELECT owner FROM documents WHERE kind = ? AND id = ?"
        with self._lock:
            return str(self._run(query, (kind, id)).fetchone()[0])

    def all(
        self, kind: str, owner: str | None = None, parent: str | None = None
    ) -> list[dict[str, Any]]:
        """Return documents of a kind, the oldest first."""
        query, values = "SELECT body FROM documents WHERE kind = ?", [kind]
        for column, value in (("owner", owner), ("parent", parent)):
            if value is not None:
                query, values = f"{query} AND {column} = ?", [*values, value]
        with self._lock:
            rows = self._run(f"{query} ORDER BY number", values).fetchall()
        return [json.loads(body) for (body,) in rows]

    def delete(self, kind: str, id: str) -> None:
        """Remove a document, if there is one."""
        with self._lock:
            self._run("DELETE FROM documents WHERE kind = ? AND id = ?", (kind, id))

    def append(self, parent: str, body: dict[str, Any]) -> None:
        """Add an entry to the journal of a document."""
        with self._lock:
            self._run(
                "INSERT INTO entries (parent, body) VALUES (?, ?)", (parent, json.dumps(body))
            )

    def entries(self, parent: str) -> list[dict[str, Any]]:
        """Return the journal of a document, the oldest entry first."""
        query = "SELECT body FROM entries WHERE parent = ? ORDER BY number"
        with self._lock:
            rows = self._run(query, (parent,)).fetchall()
        return [json.loads(body) for (body,) in rows]

    def _run(self, query: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(query, values)
        except sqlite3.OperationalError as problem:  # others are ours: that it is closed, say
            raise StoreError(
                "the server cannot keep its state.",
                found=str(problem),
                fix="Look at the disk of the folder that it was started with.",
            ) from None


def new_id(prefix: str) -> str:
    """Return a name that nobody has yet, such as "file-3f0c..."; it is safe as a file's name."""
    return prefix + secrets.token_hex(12)
