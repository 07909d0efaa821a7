"""What a picture shows, whoever draws it: lines over steps, as few points as the eye can tell."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from peftkit.report.figures import count, metric, round_ticks, size
from peftkit.report.history import History, Series

COLUMNS = 500
"""A line keeps the lowest and the highest of so many spans of steps."""
NOISY = ("loss", "grad_norm", "tokens_per_second")
Style = Literal["raw", "line", "points"]
TITLES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "peak_bytes": "Peak memory",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a picture.

    Attributes:
        points: (step, value), in the order of steps.
        color: Number of a colour.
        style: raw: faint, behind the others; points: each point is marked.
    """

    label: str
    points: Sequence[tuple[int, float]]
    color: int
    style: Style = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture: lines, seams where runs were resumed, and what the y axis counts."""

    title: str
    lines: Sequence[Line]
    text: Callable[[float], str]
    seams: Sequence[int] = ()
    low: float = field(init=False)
    high: float = field(init=False)
    last: int = field(init=False)

    def __post_init__(self) -> None:
        low, high = _range(self.lines)
        values = {"low": low, "high": high}
        last = max((point[0] for line in self.lines for point in line.points), default=1)
        for name, value in (*values.items(), ("last", max(last, 1))):
            object.__setattr__(self, name, value)

    def x(self, step: float) -> float:
        """Return a step's place, from 0 to 1."""
        return step / self.last

    def y(self, value: float) -> float:
        """Return a value's place, from 0 (below) to 1; what lies far out is put on the edge."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def y_ticks(self) -> list[float]:
        """Return the round values to write beside it."""
        return round_ticks(self.low, self.high)

    def x_ticks(self) -> list[int]:
        """Return the round steps to write below it."""
        return sorted({round(step) for step in round_ticks(0, self.last) if step == round(step)})


def charts(runs: Sequence[History]) -> list[Chart]:
    """Return the pictures of runs: one run in all detail, several laid over each other."""
    made = [_losses(runs)]
    names = dict.fromkeys(name for run in runs for name in run.evals)
    for name in names:
        if name != "loss":
            lines = [
                Line(run.name, points(run.evals[name]), color, "points")
                for color, run in enumerate(runs)
                if name in run.evals and len(run.evals[name])
            ]
            made.append(Chart(f"Eval: {name.replace('_', ' ')}", lines, _short, _seams(runs)))
    for name in dict.fromkeys(name for run in runs for name in run.figures):
        lines = []
        for color, run in enumerate(runs):
            if series := run.figures.get(name):
                smooth = points(series.smoothed())
                if len(runs) == 1:
                    lines.append(Line(name, points(series), color, "raw"))
                lines.append(Line("smoothed" if len(runs) == 1 else run.name, smooth, color))
        made.append(Chart(f"Train: {name.replace('_', ' ')}", lines, _short, _seams(runs)))
    for name, title in TITLES.items():
        lines = []
        for color, run in enumerate(runs):
            if any(run.curves[name].values):
                lines += _lines(run, name, color, alone=len(runs) == 1)
        text = size if name == "peak_bytes" else _short
        made.append(Chart(title, lines, text, _seams(runs)))
    return [chart for chart in made if any(line.points for line in chart.lines)]


def _losses(runs: Sequence[History]) -> Chart:
    lines = []
    for color, run in enumerate(runs):
        one = len(runs) == 1
        lines += _lines(run, "loss", color, alone=one)
        if "loss" in run.evals:
            label = "eval loss" if one else f"{run.name}, eval (dashed)"
            lines.append(Line(label, points(run.evals["loss"]), 1 if one else color, "points"))
    return Chart("Loss", lines, _short, _seams(runs))


def _lines(run: History, name: str, color: int, *, alone: bool) -> list[Line]:
    """Return a run's curve: smoothed over the raw one if it is alone and not smooth by itself."""
    series = run.curves[name]
    if name not in NOISY:
        return [Line(run.name, points(series), color)]
    smooth = Line("smoothed" if alone else run.name, points(series.smoothed()), color)
    return [Line(name.split("_")[0], points(series), color, "raw"), smooth] if alone else [smooth]


def points(series: Series, columns: int = COLUMNS) -> list[tuple[int, float]]:
    """Return a series' lowest and highest points of each of so many equal spans of steps."""
    steps, values = series.steps, series.values
    if len(steps) <= 2 * columns:
        return list(zip(steps, values, strict=True))
    first, spread = steps[0], steps[-1] - steps[0] + 1
    edges = [bisect_left(steps, first + spread * n // columns) for n in range(columns + 1)]
    chosen: set[int] = {0, len(steps) - 1}
    for start, stop in pairwise(edges):
        if span := values[start:stop]:
            chosen |= {start + span.index(min(span)), start + span.index(max(span))}
    return [(steps[n], values[n]) for n in sorted(chosen)]


def _range(lines: Sequence[Line]) -> tuple[float, float]:
    """Return what the y axis spans: all but the lowest and highest hundredth of raw values."""
    smooth = [value for line in lines if line.style != "raw" for _, value in line.points]
    raw = sorted(value for line in lines if line.style == "raw" for _, value in line.points)
    if not smooth and not raw:
        return 0.0, 1.0
    inner = raw[len(raw) // 100 : len(raw) - len(raw) // 100]
    ends = [*smooth, *inner[:1], *inner[-1:]]
    low, high = min(ends), max(ends)
    if 0 < low < 0.5 * high:
        low = 0.0
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return (0.0 if low == 0 else low - margin), high + margin


def _seams(runs: Sequence[History]) -> list[int]:
    return runs[0].seams if len(runs) == 1 else []


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return count(value) if abs(value) >= 100_000 else f"{value:,.0f}"
    return metric("", value) if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
