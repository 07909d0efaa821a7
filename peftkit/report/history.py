"""Reads runs from the files in their folders, during training or afterwards.

Lines that a crash left incomplete are skipped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from peftkit.config.schema import flat
from peftkit.errors import DataError, first_few
from peftkit.events import Table
from peftkit.figures import recent_mean
from peftkit.files.disk import trainer_of
from peftkit.files.strict_json import Json, JsonMap

METRICS, SAMPLES, ANSWERS = "metrics.jsonl", "samples.jsonl", "answers.jsonl"
FACTS, TASKS = "run.json", "tasks.json"
IDLE_SECONDS = 120.0
"""A run without output for this time, and for ten times its usual pause, counts as stopped."""
CURVES = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_bytes")
MAX_DEPTH = 4
SHORT_ANSWER = 120
"""Characters of a reference that a correct completion repeats exactly, such as a label."""
State = Literal["finished", "running", "stopped", "failed", "not begun"]
Curve = dict[int, float]
"""Step to value, in the order of steps."""


class RunFacts(BaseModel):
    """run.json, which `peftkit.record` writes at the start of training.

    Attributes:
        tables: Tables of data files (with a source), of the base and of the adapter.
        lengths: Split to (lower edge, number of documents) of a histogram of token counts.
        row: (kind, text) of the spans of a row in the loss. row_source: Its file and line.
        machine: Versions and settings that affect the numbers of the run.
        command: Command that uses the adapter, with "{folder}" in place of its folder.
    """

    recipe: Json = {}
    recipe_yaml: str = ""
    tables: tuple[Table, ...] = ()
    notices: tuple[str, ...] = ()
    lengths: dict[str, tuple[tuple[int, int], ...]] = {}
    row_source: str = ""
    row: tuple[tuple[str, str], ...] = ()
    machine: Json = {}
    command: str = ""
    mergeable: bool = True


@dataclass(slots=True)
class History:
    """A run, as recorded in its files.

    Attributes:
        name: Name of the run in the report.
        curves: Curves by name: CURVES, "eval/METRIC", and "train/FIGURE" for the task's figures.
        seams: Steps at which the run was resumed.
        notices: (last step before the notice, text).
        started: The latest RunStarted line. end: The RunDone or RunStopped line after it, if any.
        samples: Lines of samples.jsonl. scores: Entries of tasks.json.
        answers: Step to the lines of answers.jsonl with the highest and the lowest reward.
        labels: The last ClassReport line: metrics of each label, and the confusion matrix.
        epoch: Average number of passes over the rows.
        changed: Time of the last write to metrics.jsonl, in seconds since 1970.
    """

    folder: Path
    name: str
    curves: defaultdict[str, Curve] = field(default_factory=lambda: defaultdict(dict))
    seams: list[int] = field(default_factory=list)
    notices: list[tuple[int, str]] = field(default_factory=list)
    started: Json = field(default_factory=dict)
    end: Json = field(default_factory=dict)
    facts: RunFacts = field(default_factory=RunFacts)
    samples: list[Json] = field(default_factory=list)
    scores: list[Json] = field(default_factory=list)
    answers: dict[int, tuple[Json, Json]] = field(default_factory=dict)
    labels: Json = field(default_factory=dict)
    num_tokens: int = 0
    epoch: float = 0.0
    began: float = 0.0
    changed: float = 0.0

    @property
    def step(self) -> int:
        """The last completed step."""
        return next(reversed(self.curves["loss"]), 0)

    @property
    def num_steps(self) -> int:
        """The planned number of steps."""
        return self.started.get("num_steps") or self.step

    @property
    def seconds(self) -> float:
        """Duration so far; pauses between sessions count until the run is done."""
        return self.end.get("seconds") or max(0.0, self.changed - self.began)

    def state(self, now: float | None = None) -> State:
        """Return the state of the run at the time `now`.

        A run without an end is stopped if its process is gone. If that process is on another
        machine, it is stopped after a long silence.
        """
        if not self.started:
            return "not begun"
        if self.end:
            if self.end["event"] == "RunDone":
                return "finished"
            return "stopped" if self.end.get("state") == "stopped" else "failed"
        trainer = trainer_of(self.folder)
        if trainer is None or trainer.is_local:
            return "running" if trainer else "stopped"
        pause = (self.changed - self.began) / max(self.step, 1)
        quiet = (time.time() if now is None else now) - self.changed
        return "running" if quiet < max(IDLE_SECONDS, 10 * pause) else "stopped"

    def add(self, line: JsonMap) -> None:
        """Add an event from a line of metrics.jsonl."""
        event, step = line.get("event"), line.get("step")
        if event == "RunStarted":
            self._start(line)
        elif event == "Notice":
            self.notices.append((self.step, str(line.get("text"))))
        elif event == "StepDone" and isinstance(step, int):
            self._add_values(step, {name: line.get(name) for name in CURVES})
            self._add_values(step, line.get("figures", {}), prefix="train/")
            self.num_tokens, self.epoch = line.get("num_tokens", 0), line.get("epoch", 0.0)
        elif event == "EvalDone" and isinstance(step, int):
            self._add_values(step, line.get("metrics", {}), prefix="eval/")
        elif event == "ClassReport":
            self.labels = dict(line)
        elif event in ("RunDone", "RunStopped"):
            self.end = dict(line)

    def _add_values(self, step: int, values: JsonMap, prefix: str = "") -> None:
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):  # else a gap
                self.curves[prefix + name][step] = float(value)

    def _start(self, line: JsonMap) -> None:
        """Start a new history, or continue from the step at which the run is resumed."""
        start = line.get("start_step", 0)
        self.started, self.end, self.labels = dict(line), {}, {}
        if start == 0:
            self.began = line.get("time", 0.0)
            for part in (self.curves, self.seams, self.notices):
                part.clear()
            return
        self.seams = [*(seam for seam in self.seams if seam < start), start]
        for name, curve in self.curves.items():
            self.curves[name] = {step: value for step, value in curve.items() if step <= start}


def read_history(folder: str | Path) -> History:
    """Read a run's folder.

    Raises:
        DataError: The folder holds no run.
    """
    folder = Path(folder)
    if not is_run(folder):
        inside = [str(path.parent) for path in sorted(folder.glob(f"*/{METRICS}"))]
        lacking = f"It holds no {METRICS}, which every run writes."
        raise DataError(
            f"'{folder}' holds no run",
            found=lacking if folder.is_dir() else "There is no such folder.",
            fix=f"Runs in it: {first_few(inside, 8, ', ')}." if inside else "",
        )
    run = History(folder, str(folder))
    for line in _lines(folder / METRICS):
        run.add(line)
    run.changed = (folder / METRICS).stat().st_mtime
    with suppress(OSError, ValidationError):  # missing, or currently written
        run.facts = RunFacts.model_validate_json((folder / FACTS).read_bytes())
    samples = {(s["step"], s["prompt"]): s for s in _lines(folder / SAMPLES) if "step" in s}
    run.samples = list(samples.values())
    scores = _parsed(_read(folder / TASKS)).get("scores")
    run.scores = scores if isinstance(scores, list) else []
    run.answers = _best_and_worst(folder / ANSWERS)
    return run


def read_histories(folders: Sequence[str | Path]) -> list[History]:
    """Read several runs, named by their paths relative to the common folder."""
    runs = [read_history(folder) for folder in folders]
    if len(runs) > 1:
        paths = [Path(folder).absolute() for folder in folders]
        with suppress(ValueError):  # different drives on Windows have none
            top = os.path.commonpath([path.parent for path in paths])
            for run, path in zip(runs, paths, strict=True):
                run.name = path.relative_to(top).as_posix()
    return runs


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return (folder / METRICS).is_file()


def _best_and_worst(path: Path) -> dict[int, tuple[Json, Json]]:
    answers: dict[int, tuple[Json, Json]] = {}
    previous = 0
    for line in _lines(path):
        step, reward = line.get("step", 0), line.get("reward")
        if step < previous:  # a resumed run generates these again
            answers = {earlier: pair for earlier, pair in answers.items() if earlier < step}
        previous = step
        if isinstance(reward, int | float):
            best, worst = answers.get(step, (line, line))
            best = line if reward > best["reward"] else best
            answers[step] = best, line if reward < worst["reward"] else worst
    return answers


def _lines(path: Path) -> Iterator[Json]:
    return filter(None, map(_parsed, _read(path).splitlines()))


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _parsed(text: str | bytes) -> Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # torn, or being written
        return {}
    return value if isinstance(value, dict) else {}


def smoothed(curve: Curve) -> Curve:
    """Return the moving average over a fiftieth of all steps, at least five.

    At both ends the window is truncated, down to half its size.
    """
    number, half = len(curve), max(2, len(curve) // 100)
    sums = [0.0, *accumulate(curve.values())]
    windows = ((max(0, n - half), min(number, n + half + 1)) for n in range(number))
    means = ((sums[stop] - sums[start]) / (stop - start) for start, stop in windows)
    return dict(zip(curve, means, strict=True))


def sample_score(completion: str, reference: str | None) -> tuple[int, int] | None:
    """Return the number of correct parts of a sample, and the number of its parts.

    The parts of a JSON object are its fields, also those that only the completion has. Other short
    references are one part. None: the reference is long, or absent.
    """
    if reference is None:
        return None
    if expected := _parsed(reference):
        found = _parsed(completion)
        names, missing = expected.keys() | found.keys(), object()
        right = (expected.get(name, missing) == found.get(name, missing) for name in names)
        return sum(right), len(names)
    if len(reference) > SHORT_ANSWER:
        return None
    return int(completion.strip() == reference.strip()), 1


def sample_scores(samples: Sequence[Json]) -> dict[int, str]:
    """Return the score of each step's samples: "2 of 3 exact, 11 of 12 fields"."""
    by_step = defaultdict[int, list[tuple[int, int]]](list)
    for sample in samples:
        if score := sample_score(str(sample.get("completion", "")), sample.get("reference")):
            by_step[sample["step"]].append(score)
    texts = {}
    for step, scores in sorted(by_step.items()):
        text = f"{sum(right == parts for right, parts in scores)} of {len(scores)} exact"
        right, parts = map(sum, zip(*scores, strict=True))
        texts[step] = text + f", {right} of {parts} fields" * (parts > len(scores))
    return texts


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as a row of a table.

    Attributes:
        loss: Mean loss of the last steps (`recent_mean`).
        best_eval_loss, best_step: Minimum of the eval loss, and its step.
        changed: Time of the last write, in seconds since 1970.
        differs: Settings that differ between the runs of the table.
    """

    run: str
    state: str
    step: int
    num_steps: int
    loss: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    best_step: int | None
    seconds: float
    changed: float
    differs: dict[str, str] = field(default_factory=dict)


def row_of(run: History, differs: dict[str, str] | None = None) -> RunRow:
    """Return a run as a row of a table."""
    losses, evals = list(run.curves["loss"].values()), run.curves["eval/loss"]
    best_step = min(evals, key=evals.__getitem__, default=None)
    return RunRow(
        run=run.name,
        state=run.state(),
        step=run.step,
        num_steps=run.num_steps,
        loss=recent_mean(losses),
        eval_loss=evals[next(reversed(evals))] if evals else None,
        best_eval_loss=None if best_step is None else evals[best_step],
        best_step=best_step,
        seconds=run.seconds,
        changed=run.changed,
        differs=differs or {},
    )


def list_runs(folder: str | Path = "runs") -> list[RunRow]:
    """Return the runs in a folder, up to four levels deep, the newest first.

    Raises:
        DataError: The folder does not exist or holds no run.
    """
    top = Path(folder)
    if not top.is_dir():
        raise DataError(f"there is no folder '{top}'", fix="Use the folder of your runs.")
    depths = [top.glob("*/" * depth + METRICS) for depth in range(MAX_DEPTH + 1)]
    runs = [read_history(path.parent) for paths in depths for path in paths]
    if not runs:
        raise DataError(f"there are no runs in '{top}'", found=f"No subfolder holds a {METRICS}.")
    runs.sort(key=lambda run: -run.changed)
    return [row_of(run, settings) for run, settings in zip(runs, differing(runs), strict=True)]


def differing(runs: Sequence[History]) -> list[dict[str, str]]:
    """Return each run's settings that differ between runs, ignoring runs without a recipe."""
    recipes = [as_texts(run.facts.recipe) for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key != "train.output_dir")
    varying = [key for key in keys if len({recipe.get(key) for recipe in recipes if recipe}) > 1]
    return [{key: recipe[key] for key in varying if key in recipe} for recipe in recipes]


def as_texts(settings: Mapping[str, object]) -> dict[str, str]:
    """Return nested settings as one mapping of strings, with names joined by dots."""
    values = {name: "none" if v is None else v for name, v in flat(settings).items()}
    return {n: v if isinstance(v, str) else json.dumps(v) for n, v in values.items()}
