"""The pictures of a report as one PNG, drawn with Pillow.

Pillow and no browser, because it draws anywhere and brings a font of its own; an SVG renderer would
need fonts of the system, which servers often lack. It is drawn twice as large and scaled down,
which makes lines smooth.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from peftkit.errors import ConfigError
from peftkit.report.chart import Chart, Line, charts
from peftkit.report.history import History
from peftkit.report.look import LIGHT
from peftkit.report.verdict import verdict

SCALE = 2
WIDTH, CHART_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1200, 260, 80, 24, 34, 30
GROUND, TEXT, SOFT, RULE = "#ffffff", "#1b1f26", "#5c6675", "#dde1e7"


def picture(runs: Sequence[History]) -> bytes:
    """Return the bytes of a PNG: what was learnt, and the charts, two beside each other.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ConfigError(
            "cannot draw a PNG without Pillow.", fix='Install it: pip install "peftkit[images]"'
        ) from None
    shown = charts(runs)
    heads = [line for run in runs for line in _wrapped(f"{run.name}: {verdict(run)}")]
    head = 24 * len(heads) + 24
    rows = 1 + -(-max(len(shown) - 1, 0) // 2)
    image = Image.new("RGB", (SCALE * WIDTH, SCALE * (head + CHART_HEIGHT * rows)), GROUND)
    pen = _Pen(ImageDraw.Draw(image), {n: ImageFont.load_default(SCALE * n) for n in (11, 13, 15)})
    for number, text in enumerate(heads):
        pen.text(LEFT, 16 + 24 * number, text, 15, TEXT)
    for number, chart in enumerate(shown):
        row, column = (0, 0) if number == 0 else (1 + (number - 1) // 2, (number - 1) % 2)
        width = WIDTH if number == 0 else WIDTH // 2
        _draw(pen, chart, (column * WIDTH // 2, head + row * CHART_HEIGHT, width))
    file = io.BytesIO()
    image.resize((WIDTH, image.height // SCALE), Image.Resampling.LANCZOS).save(file, "PNG")
    return file.getvalue()


class _Pen:
    """Draws in the picture's own units."""

    def __init__(self, draw: Any, fonts: dict[int, Any]) -> None:
        self._draw, self._fonts = draw, fonts

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float) -> None:
        scaled = [(SCALE * x, SCALE * y) for x, y in points]
        self._draw.line(scaled, fill=color, width=max(1, round(SCALE * width)), joint="curve")

    def dot(self, x: float, y: float, color: str) -> None:
        box = [SCALE * (x - 3), SCALE * (y - 3), SCALE * (x + 3), SCALE * (y + 3)]
        self._draw.ellipse(box, fill=color)

    def text(
        self, x: float, y: float, text: str, size: int, color: str, anchor: str = "la"
    ) -> float:
        """Write, and return how wide it is."""
        font = self._fonts[size]
        known = text.replace("→", "->").encode("latin-1", "replace").decode("latin-1")
        self._draw.text((SCALE * x, SCALE * y), known, fill=color, font=font, anchor=anchor)
        return float(self._draw.textlength(known, font=font)) / SCALE


def _draw(pen: _Pen, chart: Chart, place: tuple[int, int, int]) -> None:
    left, top, width = place[0] + LEFT, place[1] + TOP, place[2] - LEFT - RIGHT
    height = CHART_HEIGHT - TOP - BOTTOM

    def at(step: float, value: float) -> tuple[float, float]:
        return left + width * chart.x(step), top + height * (1 - chart.y(value))

    for value in chart.y_ticks():
        y = at(0, value)[1]
        pen.line([(left, y), (left + width, y)], RULE, 1)
        pen.text(left - 8, y, chart.text(value), 11, SOFT, "rm")
    for step in chart.x_ticks():
        pen.text(at(step, 0)[0], top + height + 6, f"{step:,}", 11, SOFT, "ma")
    for step in chart.seams:
        x = at(step, 0)[0]
        pen.line([(x, top), (x, top + height)], SOFT, 1)
    x = left + pen.text(left, top - 24, chart.title, 13, TEXT) + 18
    for line in sorted(chart.lines, key=lambda line: line.style != "raw"):
        color = _color(line)
        points = [at(*point) for point in line.points]
        if len(points) > 1:
            pen.line(points, color, 1 if line.style == "raw" else 1.8)
        if line.style == "points" or len(points) == 1:
            for point in points[-60:]:
                pen.dot(*point, color)
        if len(chart.lines) > 1:
            pen.line([(x, top - 15), (x + 16, top - 15)], color, 2)
            x += 22 + pen.text(x + 20, top - 23, line.label, 11, SOFT) + 14


def _color(line: Line) -> str:
    color = LIGHT[line.color % len(LIGHT)]
    if line.style != "raw":
        return color
    parts = [int(color[n : n + 2], 16) for n in (1, 3, 5)]
    return "#" + "".join(f"{255 - (255 - part) // 3:02x}" for part in parts)  # a third as dark


def _wrapped(text: str, width: int = 140) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)
