"""The report of a run that goes on: written anew now and then, never at the run's expense."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from peftkit.config.schema import Config, dump_yaml
from peftkit.data.pack import tokens_of_each
from peftkit.events import (
    EvalDone,
    Event,
    Listener,
    Notice,
    RunDone,
    RunStarted,
    RunStopped,
    Sampled,
    Saved,
    StepDone,
    Table,
)
from peftkit.files.disk import write_text
from peftkit.report.history import FACTS, RunFacts, read_history
from peftkit.report.page import page
from peftkit.tasks.protocol import Task
from peftkit.train.checkpoints.manifest import versions

REPORT = "report.html"
SHARE = 0.02
"""Of the run's time that its report may take."""
NUM_BARS = 24
MAX_PIECE_CHARS, MAX_PIECES = 4_000, 32


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
        first = rows["train"][0]
        facts = RunFacts(
            recipe=recipe.model_dump(mode="json"),
            recipe_yaml=dump_yaml(recipe),
            tables=tuple(self.tables),
            notices=tuple(self.notices),
            lengths={name: lengths(document_lengths(found)) for name, found in rows.items()},
            row_source=str(getattr(first, "source", "")),
            row=tuple((kind, text[:MAX_PIECE_CHARS]) for kind, text in task.spans(first))[
                :MAX_PIECES
            ],
            machine={**identity, **machine()},
            command=command,
            mergeable=mergeable,
        )
        write_text(facts.model_dump_json(indent=2), folder / FACTS)


def document_lengths(rows: Sequence[Any]) -> Tensor:
    """Return how many tokens each document has; several may share a row."""
    known: Tensor | None = getattr(rows, "document_lengths", None)
    return tokens_of_each(rows) if known is None else known


def lengths(numbers: Tensor) -> tuple[tuple[int, int], ...]:
    """Return how many lengths lie in spans of equal width, each named by its lower edge."""
    if not len(numbers):
        return ()
    low, high = int(numbers.min()), int(numbers.max())
    width = max(1, -(-(high - low + 1) // NUM_BARS))
    counts = ((numbers - low) // width).bincount().tolist()
    return tuple((low + width * n, count) for n, count in enumerate(counts))


def machine() -> dict[str, Any]:
    """Return where and with what a run runs."""
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": dict(versions()),
    }


class LiveReport:
    """Writes report.html after evaluations, samples and saves, and at the end.

    What goes wrong costs one Notice and the report, not the run.

    Args:
        write_facts: Writes run.json; called when the first step is about to be done, before which
            nothing in the folder is touched.
    """

    def __init__(
        self,
        folder: Path,
        on_event: Listener,
        write_facts: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.folder, self._write_facts = folder, write_facts
        self._pass_on, self._clock = on_event, clock
        self._due = self._broken = False
        self._spent, self._began = 0.0, clock()

    def on_event(self, event: Event) -> None:
        """Pass an event on, and write if there is something new to see."""
        self._pass_on(event)
        if isinstance(event, RunStarted):
            self._try(FACTS, self._write_facts)
        elif isinstance(event, EvalDone | Sampled | Saved):
            self._due = True  # at the next step: metrics.jsonl hears of this event after us
        elif isinstance(event, StepDone) and self._due:
            if self._spent <= SHARE * (self._clock() - self._began):
                self.write()
        elif isinstance(event, RunDone):
            self._due = False
        elif isinstance(event, RunStopped):
            self.write("stopped" if event.state == "stopped" else "failed", event.text)

    def write(self, ended: Literal["failed", "stopped"] | None = None, why: str = "") -> None:
        """Write the report of this moment; `ended` before its last step, and why."""
        began = self._clock()
        self._due = False

        def write() -> None:
            run = read_history(self.folder)
            run.ended, run.why = ended or run.ended, why or run.why
            write_text(page([run]), self.folder / REPORT)

        if not self._broken:
            self._try(REPORT, write)
        self._spent += self._clock() - began

    def _try(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # whatever it is, a report never costs the run
            self._broken = True
            self._pass_on(Notice(f"{name} is no longer written: {error}"))
