"""A run's past, read from the files in its folder while it goes on or when it is over.

Whatever a crash left half written is passed over: a torn line costs that line.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from peftkit.errors import DataError, first_few
from peftkit.events import Table

METRICS, SAMPLES, ANSWERS = "metrics.jsonl", "samples.jsonl", "answers.jsonl"
FACTS, DIAGNOSIS = "run.json", "diagnosis.json"
TASKS = "tasks.json"
"""What `peftkit eval RUN --tasks` found."""
STILL_SECONDS = 120.0
"""A run that wrote nothing for so long, or for ten times its usual pause, goes on no more."""
CURVES = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_bytes")
M = TypeVar("M", bound=BaseModel)
State = Literal["finished", "running", "stopped", "failed", "not begun"]


class RunFacts(BaseModel):
    """run.json: what a run says of itself before its first step.

    Attributes:
        tables: Of files of rows (those with a source), of the base and of the adapter.
        lengths: Of each split (tokens, documents): spans of lengths by their lower edge.
        row: (kind, text) of the pieces of a row as the loss sees it; row_source: where it is from.
        machine: Versions, and what the numbers of the run depend on.
        command: What to do with the adapter, "{folder}" in the place of its folder.
    """

    recipe: dict[str, Any] = {}
    recipe_yaml: str = ""
    tables: tuple[Table, ...] = ()
    notices: tuple[str, ...] = ()
    lengths: dict[str, tuple[tuple[int, int], ...]] = {}
    row_source: str = ""
    row: tuple[tuple[str, str], ...] = ()
    machine: dict[str, Any] = {}
    command: str = ""
    mergeable: bool = True


class TaskScore(BaseModel):
    """What base and adapter reach in a task of lm-evaluation-harness."""

    task: str
    metric: str
    base: float | None = None
    adapter: float | None = None
    stderr: float | None = None
    num_rows: int | None = None


class TaskScores(BaseModel):
    """tasks.json."""

    scores: tuple[TaskScore, ...] = ()


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
        diagnosis: diagnosis.json. samples: Lines of samples.jsonl.
        answers: By step, of the model's answers in answers.jsonl the best and the worst.
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
    facts: RunFacts = field(default_factory=RunFacts)
    diagnosis: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    scores: tuple[TaskScore, ...] = ()
    answers: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    num_tokens: int = 0
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
        return self.started.get("num_steps") or self.step

    @property
    def seconds(self) -> float:
        """How long the run took so far, pauses between its parts included unless it is done."""
        return (self.done or {}).get("seconds") or max(0.0, self.changed - self.began)

    @property
    def eval_loss(self) -> Series:
        """The loss of the eval rows; without values if none was measured."""
        return self.evals.get("loss", Series())

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

    def take(self, line: dict[str, Any]) -> None:
        """Take a line of metrics.jsonl: an event of the run."""
        kind, step = line.get("event"), line.get("step")
        if kind == "RunStarted":
            self._start(line)
        elif kind == "Notice":
            self.notices.append((self.step, str(line.get("text"))))
        elif kind == "StepDone" and isinstance(step, int):
            for name in CURVES:
                self.curves[name].add(step, line.get(name))
            for name, value in line.get("figures", {}).items():
                self.figures.setdefault(name, Series()).add(step, value)
            self.num_tokens = line.get("num_tokens", 0)
        elif kind == "EvalDone" and isinstance(step, int):
            for name, value in line.get("metrics", {}).items():
                self.evals.setdefault(name, Series()).add(step, value)
        elif kind == "RunDone":
            self.done = line
        elif kind == "RunStopped":
            self.ended = "stopped" if line.get("state") == "stopped" else "failed"
            self.why = str(line.get("text"))

    def _start(self, line: dict[str, Any]) -> None:
        start = line.get("start_step", 0)
        self.done, self.ended, self.why = None, None, ""
        if start == 0:
            self.notices.clear()
            self.seams.clear()
            self.began = line.get("time", 0.0)
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
    run = History(place, str(place))
    for line in _lines(place / METRICS):
        run.take(line)
    run.changed = (place / METRICS).stat().st_mtime
    run.facts = _model(RunFacts, place / FACTS)
    diagnosis = place / DIAGNOSIS
    if diagnosis.is_file() and diagnosis.stat().st_mtime >= run.began:  # else of an earlier run
        run.diagnosis = next(iter(_lines(diagnosis, whole=True)), {})
    samples = {(s["step"], s["prompt"]): s for s in _lines(place / SAMPLES) if "step" in s}
    run.samples = list(samples.values())
    run.scores = _model(TaskScores, place / TASKS).scores
    run.answers = _answers(place / ANSWERS)
    return run


def read_histories(folders: Sequence[str | Path]) -> list[History]:
    """Read several runs; each is called by the end of its path that no other has."""
    runs = [read_history(folder) for folder in folders]
    shorten_names(runs)
    return runs


def shorten_names(runs: Sequence[History]) -> None:
    """Call each of several runs by the end of its path that no other has."""
    for length in range(1, 1 + max(len(run.folder.parts) for run in runs)):
        names = ["/".join(run.folder.parts[-length:]) for run in runs]
        if len(runs) > 1 and len(set(names)) == len(names):
            for run, name in zip(runs, names, strict=True):
                run.name = name
            return


def is_run(folder: Path) -> bool:
    """Return whether a run wrote into a folder."""
    return (folder / METRICS).is_file()


def _answers(path: Path) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    last = 0
    for line in _lines(path):
        step, reward = line["step"], line.get("reward")
        if step < last:  # a resumed run makes these answers again
            found = {known: pair for known, pair in found.items() if known < step}
        last = step
        if isinstance(reward, int | float):
            best, worst = found.get(step, (line, line))
            best = line if reward > best["reward"] else best
            found[step] = best, line if reward < worst["reward"] else worst
    return found


def _lines(path: Path, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file's lines, or the one that the whole file is."""
    if not path.is_file():
        return
    raw = path.read_bytes()
    for text in [raw] if whole else raw.splitlines():
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):  # torn, or being written
            continue
        if isinstance(found, dict):
            yield found


def _model(kind: type[M], path: Path) -> M:
    """Return what a JSON file holds; nothing of one that is not there or not whole."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return kind()
