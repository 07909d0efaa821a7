"""What the store has of a job: its document, its events, its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from peftkit.serve.store import Store, new_id

JOB, CHECKPOINT = "job", "checkpoint"
"""Kinds of documents. A job's has `told`, what clients see; `asked`, its request; `name`, that of
the model that it makes; and `base`, the one that it was made over."""
ENDED = ("succeeded", "failed", "cancelled")

Level = Literal["info", "warn", "error"]


@contextmanager
def changing(store: Store, id: str) -> Iterator[dict[str, Any]]:
    """Yield a job's document, which is written when the context ends, with all else in it."""
    with store.transaction():
        job = store.get(JOB, id)
        assert job is not None
        yield job
        store.put(JOB, id, job, owner=store.owner(JOB, id))


def tell(
    store: Store, id: str, text: str, level: Level = "info", data: Mapping[str, Any] | None = None
) -> None:
    """Add an event to a job's, in one line."""
    event = {
        "object": "fine_tuning.job.event",
        "id": new_id("ftevent-"),
        "created_at": int(time.time()),
        "level": level,
        "message": " ".join(text.split()),
        "type": "metrics" if data else "message",
        "data": dict(data or {}),
    }
    store.append(id, event)


def add_warning_once(store: Store, id: str, text: str) -> None:
    """Warn of what a run says each time that it goes on."""
    if " ".join(text.split()) not in (event["message"] for event in store.entries(id)):
        tell(store, id, text, "warn")
