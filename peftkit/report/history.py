"""A run's past, read from the files in its folder while it goes on or when it is over.

Whatever a crash left half written is passed over: a torn line costs that line.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peftkit.errors import DataError, first_few

METRICS, SAMPLES, ANSWERS = "metrics.jsonl", "samples.jsonl", "answers.jsonl"
FACTS, DIAGNOSIS = "run.json", "diagnosis.json"
TASKS = "tasks.json"
"""What `peftkit eval RUN --tasks` found."""
FILES = (METRICS, SAMPLES, FACTS, DIAGNOSIS, TASKS)
"""All that a report is made of."""
MAX_LINE_BYTES, MAX_FACTS_BYTES = 1 << 20, 1 << 24
MAX_NOTICES, MAX_SAMPLES = 200, 5_000
STILL_SECONDS = 120.0
"""A run that wrote nothing for so long, or for ten times its usual pause, goes on no more."""
CURVES = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_bytes")
State = Literal["finished", "running", "stopped", "failed", "not begun"]


@dataclass(slots=True)
class Series:
    """Numbers over steps; 16 bytes each."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, value: Any) -> None:
        """Add a step's value; what is no finite number leaves a gap."""
        if isinstance(value, int | float) and math.isfinite(value):
            self.cut(step - 1)  # of two lines for one step the later counts
            self.steps.append(step)
            self.values.append(float(value))

    def cut(self, last: int) -> None:
        """Forget what came after a step."""
        if self.steps and self.steps[-1] > last:
            keep = bisect_right(self.steps, last)
            del self.steps[keep:]
            del self.values[keep:]

    def best(self) -> tuple[int, float] | None:
        """Return the step and the value of the lowest; None of no value."""
        at = min(range(len(self)), key=lambda n: self.values[n], default=None)
        return None if at is None else (self.steps[at], self.values[at])

    def smoothed(self) -> Series:
        """Return the mean around each step, over a fiftieth of all steps and at least five.

        At both ends the window is cut off, to no less than its half.
        """
        number = len(self)
        half = max(2, number // 100)
        sums = [0.0]
        for value in self.values:
            sums.append(sums[-1] + value)
        made = Series(steps=self.steps)
        for at in range(number):
            start, stop = max(0, at - half), min(number, at + half + 1)
            made.values.append((sums[stop] - sums[start]) / (stop - start))
        return made


@dataclass(slots=True)
class History:
    """All that is known of a run.

    Attributes:
        name: How the run is called: its folder.
        curves: By name, over steps (CURVES).
        evals: By metric, over steps. figures: What else the task tells of each step, by name.
        seams: Steps at which the run was resumed.
        notices: (after which step, what was said).
        started: The newest RunStarted line. done: The RunDone line, if the run came to its end.
        ended: "failed" or "stopped", if it ended before; and why.
        facts: run.json: the recipe, the data, the machine. diagnosis: diagnosis.json.
        samples: Lines of samples.jsonl. scores: What tasks.json says.
        answers: By step, of the model's answers in answers.jsonl the best and the worst.
        num_torn: Lines that could not be read.
        read_bytes: How much of metrics.jsonl was read.
        changed: When metrics.jsonl was last written, in seconds since 1970.
    """

    folder: Path
    name: str
    curves: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in CURVES})
    evals: dict[str, Series] = field(default_factory=dict)
    figures: dict[str, Series] = field(default_factory=dict)
    seams: list[int] = field(default_factory=list)
    notices: list[tuple[int, str]] = field(default_factory=list)
    started: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] | None = None
    ended: Literal["failed", "stopped"] | None = None
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    diagnosis: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    num_tokens: int = 0
    num_torn: int = 0
    read_bytes: int = 0
    began: float = 0.0
    changed: float = 0.0

    @property
    def step(self) -> int:
        """The last step that was done."""
        steps = self.curves["loss"].steps
        return steps[-1] if steps else 0

    @property
    def num_steps(self) -> int:
        """The steps that were planned."""
        return int(_number(self.started.get("num_steps"))) or self.step

    @property
    def seconds(self) -> float:
        """How long the run took so far, pauses between its parts included unless it is done."""
        known = _number((self.done or {}).get("seconds"))
        return known or max(0.0, self.changed - self.began)

    @property
    def eval_loss(self) -> Series:
        """The loss of the eval rows; without values if none was measured."""
        return self.evals.get("loss", Series())

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe as plain values; empty if the run says none."""
        found = self.facts.get("recipe")
        return found if isinstance(found, dict) else {}

    def state(self, now: float | None = None) -> State:
        """Return how the run stands."""
        if self.done is not None:
            return "finished"
        if self.diagnosis:
            return "failed"
        if not self.started:
            return "not begun"
        if self.ended is not None:
            return self.ended
        pause = (self.changed - self.began) / max(self.step, 1)
        quiet = (time.time() if now is None else now) - self.changed
        return "running" if quiet < max(STILL_SECONDS, 10 * pause) else "stopped"

    def refresh(self) -> None:
        """Read what was written since the last time."""
        path = self.folder / METRICS
        try:
            with open(path, "rb") as file:
                file.seek(self.read_bytes)
                for raw in file:
                    if not raw.endswith(b"\n"):  # being written, or torn: looked at again later
                        break
                    self.read_bytes += len(raw)
                    self._take(raw)
            self.changed = path.stat().st_mtime
        except OSError:
            pass
        self.facts = _object(self.folder / FACTS)
        self.diagnosis = self._current(DIAGNOSIS)
        self.samples = _samples(self.folder / SAMPLES)
        scores = _object(self.folder / TASKS).get("scores")
        known = scores if isinstance(scores, list) else []
        self.scores = [score for score in known if isinstance(score, dict)]
        self.answers = _answers(self.folder / ANSWERS)

    def _current(self, name: str) -> dict[str, Any]:
        """Return a JSON file unless an earlier run in this folder wrote it."""
        path = self.folder / name
        try:
            return _object(path) if path.stat().st_mtime >= self.began else {}
        except OSError:
            return {}

    def _take(self, raw: bytes) -> None:
        line = _parsed(raw)
        if line is None:
            self.num_torn += bool(raw.strip())
            return
        kind, step = line.get("event"), line.get("step")
        if kind == "RunStarted":
            self._start(line)
        elif kind == "Notice":
            if len(self.notices) < MAX_NOTICES:
                self.notices.append((self.step, str(line.get("text", ""))))
        elif not isinstance(step, int):
            return
        elif kind == "StepDone":
            for name in CURVES:
                self.curves[name].add(step, line.get(name))
            figures = line.get("figures")
            for name, value in figures.items() if isinstance(figures, dict) else ():
                self.figures.setdefault(str(name), Series()).add(step, value)
            self.num_tokens = int(_number(line.get("num_tokens")))
        elif kind == "EvalDone" and isinstance(line.get("metrics"), dict):
            for name, value in line["metrics"].items():
                self.evals.setdefault(str(name), Series()).add(step, value)
        elif kind == "RunDone":
            self.done = line
        elif kind == "RunStopped":
            self.ended = "stopped" if line.get("state") == "stopped" else "failed"
            self.why = str(line.get("text", ""))

    def _start(self, line: dict[str, Any]) -> None:
        start = int(_number(line.get("start_step")))
        self.done, self.ended, self.why = None, None, ""
        if start == 0:
            self.notices.clear()
            self.seams.clear()
            self.began = _number(line.get("time"))
        else:
            self.seams = [*(seam for seam in self.seams if seam < start), start]
        for series in (*self.curves.values(), *self.evals.values(), *self.figures.values()):
            series.cut(start - (start == 0))
        self.evals = {name: series for name, series in self.evals.items() if series}
        self.started = line


def read_history(folder: str | Path) -> History:
    """Read a run's folder.

    Raises:
        DataError: There is no run in it.
    """
    place = Path(folder)
    if not place.is_dir():
        raise DataError(f"there is no run '{place}'", found="There is no such folder.")
    if not is_run(place):
        inside = [str(path.parent) for path in sorted(place.glob(f"*/{METRICS}"))]
        raise DataError(
            f"'{place}' holds no run",
            found=f"It holds no {METRICS}, which every run writes.",
            fix=f"Runs in it: {first_few(inside, 8, ', ')}." if inside else "",
        )
    found = History(place, str(place))
    found.refresh()
    return found


def shorten_names(runs: Sequence[History]) -> None:
    """Call each run by the end of its path that no other has."""
    for length in range(1, 1 + max(len(run.folder.parts) for run in runs)):
        names = ["/".join(run.folder.parts[-length:]) for run in runs]
        if len(set(names)) == len(names):
            for run, name in zip(runs, names, strict=True):
                run.name = name
            return


def is_run(folder: Path) -> bool:
    """Return whether a run wrote into a folder."""
    return (folder / METRICS).is_file()


def _samples(path: Path) -> list[dict[str, Any]]:
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    for line in _lines_of(path):
        if len(lines) < MAX_SAMPLES:
            lines[line["step"], str(line.get("prompt"))] = line
    return list(lines.values())


def _answers(path: Path) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    last = 0
    for line in _lines_of(path):
        step, reward = line["step"], line.get("reward")
        if step < last:  # a resumed run makes these answers again
            found = {known: pair for known, pair in found.items() if known < step}
        last = step
        if isinstance(reward, int | float):
            best, worst = found.get(step, (line, line))
            best = line if reward > best["reward"] else best
            found[step] = best, line if reward < worst["reward"] else worst
    return found


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that have a step."""
    try:
        with open(path, "rb") as file:
            for raw in file:
                line = _parsed(raw)
                if line and isinstance(line.get("step"), int):
                    yield line
    except OSError:
        return


def _parsed(raw: bytes) -> dict[str, Any] | None:
    if len(raw) > MAX_LINE_BYTES:
        return None
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FACTS_BYTES:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
