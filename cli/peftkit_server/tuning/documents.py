"""Documents of fine-tuning jobs in the store: jobs, their events, their checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from peftkit_server.refusals import public
from peftkit_server.store import Store, new_id

JOB, CHECKPOINT = "job", "checkpoint"
"""Kinds of documents. Fields: `response`, the object that clients receive; of a job further
`request`, its body; `name`, the name of its model; and `base`, the base it trains over."""
ENDED = ("succeeded", "failed", "cancelled")

Level = Literal["info", "warn", "error"]


def rename_old_fields(store: Store) -> None:
    """Rename the fields `told` and `asked` of documents by older servers."""
    with store.transaction():
        for kind in (JOB, CHECKPOINT):
            for body in store.all(kind):
                if "told" in body:
                    response = body["response"] = body.pop("told")
                    if kind == JOB:
                        body["request"] = body.pop("asked")
                    owner = store.owner(kind, response["id"])
                    parent = response.get("fine_tuning_job_id", "")
                    store.put(kind, response["id"], body, owner=owner, parent=parent)


@contextmanager
def changing(store: Store, id: str) -> Iterator[dict[str, Any]]:
    """Yield a job's document and write it at the end; the context is one transaction."""
    with store.transaction():
        job = store.existing(JOB, id)
        yield job
        store.put(JOB, id, job, owner=store.owner(JOB, id))


def add_event(
    store: Store,
    id: str,
    text: str,
    level: Level = "info",
    data: Mapping[str, object] | None = None,
) -> None:
    """Append an event to a job's journal; its message is one line."""
    event = {
        "object": "fine_tuning.job.event",
        "id": new_id("ftevent-"),
        "created_at": int(time.time()),
        "level": level,
        "message": _line(text),
        "type": "metrics" if data else "message",
        "data": dict(data or {}),
    }
    store.append(id, event)


def add_warning_once(store: Store, id: str, text: str) -> None:
    """Add a warning unless the job has it already; a resumed run repeats its notices."""
    if _line(text) not in (event["message"] for event in store.entries(id)):
        add_event(store, id, text, "warn")


def _line(text: str) -> str:
    """Return a text for clients in one line."""
    return " ".join(public(text).split())
