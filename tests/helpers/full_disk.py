"""A disk on which a server cannot write."""

import threading
from pathlib import Path
from typing import Any

import pytest

from peftkit_server.store import Store, StoreError
from peftkit_server.tuning import jobs


class Full:
    """A disk that is full while `is_full`: the store can be read, and nothing is written.

    Attributes:
        file: Once it is removed, the store has room.
    """

    file: Path | None = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.refused, execute = False, threading.Event(), Store._run

        def run(store: Store, query: str, values: Any = ()) -> Any:
            has_room = self.file is not None and not self.file.exists()
            if self.is_full and not has_room and query.startswith(("INSERT", "DELETE")):
                self.refused.set()
                raise StoreError("the server cannot store its state.", found="disk is full")
            return execute(store, query, values)

        monkeypatch.setattr(Store, "_run", run)
        monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.05)

    def for_a_moment(self) -> None:
        """Be full until something could not be written."""
        self.refused.clear()
        self.is_full = True
        assert self.refused.wait(60)
        self.is_full = False
