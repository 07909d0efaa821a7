"""What a run says of itself before its first step: run.json, beside metrics.jsonl."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from peftkit.config.schema import Config, dump_yaml
from peftkit.data.pack import tokens_of_each
from peftkit.events import Event, Listener, Notice, Table
from peftkit.files.disk import write_json
from peftkit.report.history import FACTS
from peftkit.tasks.protocol import Task
from peftkit.train.checkpoints.manifest import versions

NUM_BARS = 24
MAX_PIECE_CHARS, MAX_ROW_CHARS = 4_000, 12_000


class BeforeRun:
    """Passes events on, keeps what is told before the first step, and writes it to run.json."""

    def __init__(self, on_event: Listener) -> None:
        self._pass_on = on_event
        self.tables: list[Table] = []
        self.notices: list[str] = []

    def on_event(self, event: Event) -> None:
        """Hear an event."""
        if isinstance(event, Table):
            self.tables.append(event)
        elif isinstance(event, Notice):
            self.notices.append(event.text)
        self._pass_on(event)

    def write(
        self,
        folder: Path,
        recipe: Config,
        task: Task,
        rows: Mapping[str, Sequence[Any]],
        *,
        command: str,
        mergeable: bool,
        identity: Mapping[str, Any],
    ) -> None:
        """Write run.json.

        Args:
            rows: Of each split, as they are learnt.
            command: What to do with the adapter, "{folder}" in the place of its folder.
            mergeable: Whether it can be merged.
            identity: What the numbers of the run depend on, besides versions and machine.
        """
        tables = [
            {
                "title": t.title,
                "columns": list(t.columns),
                "rows": [list(row) for row in t.rows],
                "source": t.source,
                "counts": dict(t.counts),
            }
            for t in self.tables
        ]
        first = rows["train"][0]
        facts = {
            "recipe": recipe.model_dump(mode="json"),
            "recipe_yaml": dump_yaml(recipe),
            "tables": tables,
            "notices": self.notices,
            "data": {name: lengths(document_lengths(found)) for name, found in rows.items()},
            "row": shown_row(str(getattr(first, "source", "")), task.spans(first)),
            "machine": {**identity, **machine(versions())},
            "command": command,
            "mergeable": mergeable,
        }
        write_json(facts, folder / FACTS)


def document_lengths(rows: Sequence[Any]) -> Tensor:
    """Return how many tokens each document has; several may share a row."""
    known: Tensor | None = getattr(rows, "document_lengths", None)
    return tokens_of_each(rows) if known is None else known


def lengths(numbers: Tensor) -> dict[str, Any]:
    """Return counts of lengths in spans of equal width, each named by its lower edge."""
    if not len(numbers):
        return {}
    low, high = int(numbers.min()), int(numbers.max())
    width = max(1, -(-(high - low + 1) // NUM_BARS))
    counts = ((numbers - low) // width).bincount().tolist()
    edges = [low + width * n for n in range(len(counts))]
    return {
        "num_rows": len(numbers),
        "lengths": {"edges": edges, "counts": counts},
        "shortest": low,
        "longest": high,
        "num_tokens": int(numbers.sum()),
    }


def shown_row(source: str, pieces: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a row as the loss sees it, very long texts cut."""
    shown, room = [], MAX_ROW_CHARS
    for kind, text in pieces:
        cut = text[: min(MAX_PIECE_CHARS, max(room, 0))]
        shown.append([kind, cut if len(cut) == len(text) else f"{cut} [...]"])
        room -= len(cut)
        if room <= 0:
            break
    return {"source": source, "pieces": shown}


def machine(known: Mapping[str, str]) -> dict[str, Any]:
    """Return where and with what a run runs."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {
        "cores": os.cpu_count(),
        "system": system,
        "python": platform.python_version(),
        "versions": dict(known),
    }
