"""Runs whose files are followed: each poll reads only the bytes that were appended."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peftkit.figures import loss_name
from peftkit.files.disk import trainer_of
from peftkit.formats.folders import CONFIG, NOTES
from peftkit.report.chart import charts
from peftkit.report.history import (
    FACTS,
    MAX_DEPTH,
    METRICS,
    SAMPLES,
    Curve,
    History,
    RunFacts,
    differing,
    row_of,
    sample_score,
    sample_scores,
)
from peftkit_studio.folder import file_name

SCAN_SECONDS = 5.0
"""Interval between two searches for new folders; known runs are read in each poll."""
SPARKLINE_POINTS = 48
MAX_SAMPLES = 200


class FollowedRun:
    """A run, updated as its files grow.

    Attributes:
        history: The run as read so far.
        facts_time: Time at which run.json was written, in nanoseconds.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._reset()

    def _reset(self) -> None:
        self.history = History(self.folder, self.name)
        self._inode, self._offset, self._incomplete = 0, 0, b""
        self.facts_time = self._samples_time = 0

    def refresh(self) -> bool:
        """Read new lines; return whether the run changed."""
        try:
            stat = (self.folder / METRICS).stat()
        except OSError:
            return False
        if stat.st_ino != self._inode or stat.st_size < self._offset:  # replaced by --overwrite
            self._reset()
            self._inode = stat.st_ino
        is_new = stat.st_size > self._offset
        if is_new:
            with open(self.folder / METRICS, "rb") as file:
                file.seek(self._offset)
                *lines, self._incomplete = (self._incomplete + file.read()).split(b"\n")
                self._offset = file.tell()
            for line in lines:
                with suppress(ValueError, RecursionError):
                    if isinstance(value := json.loads(line), dict):
                        self.history.add(value)
            self.history.changed = stat.st_mtime
        is_new = self._read_facts() or is_new
        return self._read_samples() or is_new

    @property
    def version(self) -> str:
        """A text that changes with the files, and is the same after a restart of the server."""
        return f"{self._inode:x}-{self._offset:x}-{self.facts_time:x}-{self._samples_time:x}"

    def _read_facts(self) -> bool:
        changed = _time(self.folder / FACTS)
        if changed == self.facts_time:
            return False
        self.facts_time = changed
        with suppress(OSError, ValueError):  # missing, or currently written
            text = (self.folder / FACTS).read_bytes()
            self.history.facts = RunFacts.model_validate_json(text)
        return True

    def _read_samples(self) -> bool:
        changed = _time(self.folder / SAMPLES)
        if changed == self._samples_time:
            return False
        samples = {}
        for line in (self.folder / SAMPLES).read_bytes().splitlines() if changed else ():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                sample = json.loads(line)
                samples[sample["step"], sample["prompt"]] = sample
        self.history.samples, self._samples_time = list(samples.values()), changed
        return True

    @property
    def state(self) -> str:
        """The state of the run; a resumed one runs before it writes its first line."""
        trainer = trainer_of(self.folder)
        return "running" if trainer and trainer.is_local else self.history.state()

    def row(self, differs: dict[str, str]) -> dict[str, Any]:
        """Return the run as a row of the table of runs."""
        run, state = self.history, self.state
        recipe, speeds = run.facts.recipe, run.curves["tokens_per_second"]
        return {
            **asdict(row_of(run, differs)),
            "file": file_name(self.name),
            "state": state,
            "loss_name": loss_name(run.step),
            "version": self.version,
            "sparkline": _thinned(run.curves["loss"]),
            "seconds_left": self._seconds_left() if state == "running" else None,
            "tokens_per_second": speeds[next(reversed(speeds))] if speeds else None,
            "peak_bytes": max(run.curves["peak_bytes"].values(), default=0.0),
            "task": _type_of(recipe.get("task")),
            "base": recipe.get("base", {}).get("model", ""),
            "has_adapter": (self.folder / CONFIG).is_file(),
            "has_checkpoint": any((self.folder / "checkpoints").glob("step-*")),
            "can_chat": (self.folder / NOTES).is_file() and "peftkit chat" in run.facts.command,
        }

    def _seconds_left(self) -> float | None:
        """Estimate from the steps since the run began or was resumed."""
        run = self.history
        num_done = run.step - run.started.get("start_step", 0)
        seconds = run.changed - run.started.get("time", run.changed)
        return seconds / num_done * (run.num_steps - run.step) if num_done > 0 else None

    def detail(self) -> dict[str, Any]:
        """Return everything in the view of a run except its curves."""
        run = self.history
        samples = [
            {**sample, "score": sample_score(str(sample["completion"]), sample.get("reference"))}
            for sample in run.samples[-MAX_SAMPLES:]
        ]
        return {
            "facts": run.facts.model_dump(mode="json"),
            "started": run.started,
            "end": run.end,
            "notices": [(0, text) for text in run.facts.notices] + run.notices,
            "samples": samples,
            "scores": list(sample_scores(run.samples).items()),
            "epoch": run.epoch,
        }


def charts_of(runs: list[FollowedRun]) -> list[dict[str, Any]]:
    """Return the charts of the report as JSON, which the page draws."""
    for run in runs:
        run.history.name = run.name
    return [
        {
            "title": chart.title,
            "name": chart.name,
            "span": chart.span,
            "last": chart.last_step,
            "seams": list(chart.seams),
            "y": chart.y_ticks(),
            "x": chart.x_ticks(),
            "lines": [
                {
                    "label": line.label,
                    "color": line.color,
                    "style": line.style,
                    "points": [(step, _rounded(value)) for step, value in line.points],
                }
                for line in chart.lines
            ],
        }
        for chart in charts([run.history for run in runs])
    ]


class RunsFolder:
    """All runs of a folder, by their paths in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, FollowedRun] = {}
        self._scanned = -math.inf
        self._facts: list[tuple[str, int]] = []
        self._differs: dict[str, dict[str, str]] = {}
        self._rows: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {}

    def refresh(self) -> None:
        """Read what all runs have written."""
        if time.monotonic() - self._scanned > SCAN_SECONDS:
            self.scan()
        for run in self.runs.values():
            run.refresh()

    def scan(self) -> None:
        """Search for runs."""
        self._scanned = time.monotonic()
        found = {}
        for depth in range(1, MAX_DEPTH + 1):
            for path in self.folder.glob("*/" * depth + METRICS):
                name = path.parent.relative_to(self.folder).as_posix()
                found[name] = self.runs.get(name) or FollowedRun(path.parent, name)
        self.runs = found

    def find(self, name: str) -> FollowedRun | None:
        """Return a run by its name, also one that is new; None: there is none."""
        if name not in self.runs:
            self.scan()
        return self.runs.get(name)

    def rows(self) -> list[dict[str, Any]]:
        """Return the table of runs, the newest first; unchanged rows come from the last call."""
        runs = sorted(self.runs.values(), key=lambda run: -run.history.changed)
        facts = sorted((run.name, run.facts_time) for run in runs)
        if facts != self._facts:
            settings = differing([run.history for run in runs])
            self._differs = {run.name: s for run, s in zip(runs, settings, strict=True)}
            self._facts, self._rows = facts, {}
        for run in runs:
            key = (run.version, run.state)
            if run.name not in self._rows or self._rows[run.name][0] != key:
                self._rows[run.name] = key, run.row(self._differs[run.name])
        return [self._rows[run.name][1] for run in runs]


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _thinned(curve: Curve) -> list[float]:
    """Return the means of up to SPARKLINE_POINTS equal parts of a curve."""
    values = list(curve.values())
    size = max(1, math.ceil(len(values) / SPARKLINE_POINTS))
    parts = (values[start : start + size] for start in range(0, len(values), size))
    return [_rounded(sum(part) / len(part)) for part in parts]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _type_of(task: Any) -> str:
    return task.get("type", "") if isinstance(task, dict) else str(task or "")
