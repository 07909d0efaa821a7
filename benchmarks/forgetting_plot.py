"""Draw eval loss against drift, with a curve over the learning rates of each method, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 130, 20, 52
COLORS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#b8860b",
    "#0099cc",
    "#aa3377",
    "#888888",
    "#dd7711",
    "#7a5cff",
)
INK = "#808890"
"""Readable on white and on black."""


class Point(NamedTuple):
    """A run: drift in nats a token, and eval loss."""

    drift: float
    loss: float


class Axis(NamedTuple):
    """A logarithmic axis from `low` to `high`, drawn from pixel `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """The powers of ten within the axis."""
        low, high = (math.log10(value) for value in (self.low, self.high))
        return [10.0**n for n in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]


def plot(curves: Mapping[str, Sequence[Point]]) -> str:
    """Return the plot of labelled curves as SVG."""
    points = [point for curve in curves.values() for point in curve]
    x = Axis(*_range([point.drift for point in points]), LEFT, WIDTH - RIGHT)
    y = Axis(*_range([point.loss for point in points]), HEIGHT - BOTTOM, TOP)
    parts = [*_axes(x, y)]
    labels = list[tuple[float, float, str, str]]()
    for n, (label, curve) in enumerate(curves.items()):
        color = COLORS[n % len(COLORS)]
        places = [(x.at(point.drift), y.at(point.loss)) for point in curve]
        joined = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{color}"/>' for left, top in places
        ]
        labels.append((*max(places), label.replace("`", ""), color))
    parts += _labels(labels)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = 'font-family="system-ui, sans-serif" font-size="13"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{body}\n</svg>\n'


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return limits with some room around positive values."""
    positive = [value for value in values if value > 0]
    return min(positive) / 1.5, max(positive) * 1.5


def _axes(x: Axis, y: Axis) -> Iterator[str]:
    for tick in x.ticks:
        left = f"{x.at(tick):.1f}"
        yield f'<line x1="{left}" x2="{left}" y1="{y.end}" y2="{y.start}" stroke="{INK}66"/>'
        yield _text(x.at(tick), y.start + 20, f"{tick:g}", INK, "middle")
    for tick in y.ticks:
        top = f"{y.at(tick):.1f}"
        yield f'<line x1="{x.start}" x2="{x.end}" y1="{top}" y2="{top}" stroke="{INK}66"/>'
        yield _text(x.start - 8, y.at(tick) + 4, f"{tick:g}", INK, "end")
    yield _text((x.start + x.end) / 2, HEIGHT - 8, "drift, nats per token", INK, "middle")
    yield _text(x.start - 52, y.end - 4, "eval loss", INK, "start")


def _labels(labels: Sequence[tuple[float, float, str, str]]) -> Iterator[str]:
    """Yield the labels at the right ends of the curves, without overlaps."""
    lowest = 0.0
    for left, top, label, color in sorted(labels, key=lambda each: each[1]):
        lowest = max(top + 4, lowest + 15)
        yield _text(left + 9, lowest, label, color, "start")


def _text(left: float, top: float, text: str, color: str, anchor: str) -> str:
    place = f'x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}">{text}</text>'
