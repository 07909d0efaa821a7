"""What a picture shows, whoever draws it: lines over steps, as few points as the eye can tell."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from peftkit.report.figures import count, metric, round_ticks, size
from peftkit.report.history import History, Series

COLUMNS = 500
"""A line keeps the lowest and the highest of so many spans of steps."""
Style = Literal["raw", "line", "points"]
TITLES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "peak_bytes": "Peak memory",
}
SMOOTH = ("learning_rate", "peak_bytes")
"""Curves that are so by themselves."""


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


@dataclass(frozen=True)
class Chart:
    """A picture: lines, seams where runs were resumed, and what the y axis counts."""

    title: str
    lines: Sequence[Line]
    seams: Sequence[int] = ()

    def text(self, value: float) -> str:
        """Return a value as the y axis tells it."""
        return size(value) if self.title == TITLES["peak_bytes"] else _short(value)

    @cached_property
    def _range(self) -> tuple[float, float]:
        """What the y axis spans: all but the lowest and highest hundredth of raw values."""
        smooth = [value for line in self.lines if line.style != "raw" for _, value in line.points]
        raw = sorted(v for line in self.lines if line.style == "raw" for _, v in line.points)
        inner = raw[len(raw) // 100 : len(raw) - len(raw) // 100]
        ends = [*smooth, *inner[:1], *inner[-1:]]
        low, high = min(ends), max(ends)
        if 0 < low < 0.5 * high:
            low = 0.0
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        return (0.0 if low == 0 else low - margin), high + margin

    @property
    def low(self) -> float:
        """The lowest value that has room."""
        return self._range[0]

    @property
    def high(self) -> float:
        """The highest value that has room."""
        return self._range[1]

    @cached_property
    def last(self) -> int:
        """The last step."""
        return max(1, *(line.points[-1][0] for line in self.lines if line.points))

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
    alone = len(runs) == 1
    losses = _smoothed(runs, [run.curves["loss"] for run in runs], "loss")
    for color, run in enumerate(runs):
        label = "eval loss" if alone else f"{run.name}, eval (dashed)"
        losses.append(Line(label, points(run.eval_loss), 1 if alone else color, "points"))
    found = {"Loss": losses}
    for name in _names(run.evals for run in runs):
        if name != "loss":
            found[f"Eval: {_words(name)}"] = [
                Line(run.name, points(run.evals.get(name, Series())), color, "points")
                for color, run in enumerate(runs)
            ]
    for name in _names(run.figures for run in runs):
        series = [run.figures.get(name, Series()) for run in runs]
        found[f"Train: {_words(name)}"] = _smoothed(runs, series, name)
    for name, title in TITLES.items():
        series = [run.curves[name] for run in runs]
        if not any(any(one.values) for one in series):
            continue
        if name in SMOOTH:
            pairs = enumerate(zip(runs, series, strict=True))
            found[title] = [Line(run.name, points(one), color) for color, (run, one) in pairs]
        else:
            found[title] = _smoothed(runs, series, name)
    seams = runs[0].seams if alone else []
    shown = {title: [line for line in lines if line.points] for title, lines in found.items()}
    return [Chart(title, lines, seams) for title, lines in shown.items() if lines]


def _smoothed(runs: Sequence[History], series: Sequence[Series], name: str) -> list[Line]:
    """Return each run's curve smoothed, over the raw one if it is alone."""
    if len(runs) == 1:
        raw = Line(name.split("_")[0], points(series[0]), 0, "raw")
        return [raw, Line("smoothed", points(series[0].smoothed()), 0)]
    pairs = enumerate(zip(runs, series, strict=True))
    return [Line(run.name, points(one.smoothed()), color) for color, (run, one) in pairs]


def _names(found: Iterable[Mapping[str, Series]]) -> list[str]:
    return list(dict.fromkeys(name for known in found for name in known))


def _words(name: str) -> str:
    return name.replace("_", " ")


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


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return count(value) if abs(value) >= 100_000 else f"{value:,.0f}"
    return metric("", value) if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
