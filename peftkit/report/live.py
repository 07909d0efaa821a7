"""The report of a run that goes on: written anew now and then, never at the run's expense."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

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
from peftkit.report.history import FACTS, read_history
from peftkit.report.page import page

REPORT = "report.html"
SHARE = 0.02
"""Of the run's time that its report may take."""


class BeforeRun:
    """Passes events on, and keeps what is told before the first step, for run.json."""

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
