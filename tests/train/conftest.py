"""No waiting for the disk: whether bytes are durable cannot be seen from here anyway."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest

from peftkit.execution import out_of_memory


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def quick_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a failed attempt leaves the youngest alone: all that is here takes a second."""
    monkeypatch.setattr(out_of_memory, "gc", SimpleNamespace(collect=lambda: gc.collect(0)))
