"""Charts as HTML with inline SVG: the curves stretch with the page, the text beside them does not.

The curves' own numbers are not there twice: the script under the pointer reads them off the lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from peftkit.report.chart import Chart, Line
from peftkit.report.html import text

WIDTH, HEIGHT = 1000, 300
"""Units of the drawing, which is stretched."""
NUM_COLORS = 8
MAX_DOTS = 60
"""Of more points only the last has a dot."""


def drawn(chart: Chart) -> str:
    """Return a chart as a figure."""
    lines = sorted(chart.lines, key=lambda line: line.style != "raw")
    shapes = [
        *(_rule(chart, value) for value in chart.y_ticks()),
        *(_seam(chart, step) for step in chart.seams),
        *(_line(chart, line) for line in lines),
    ]
    dots = [_dots(chart, line) for line in lines if line.style == "points"]
    y_axis = (
        f'<span style="bottom:{100 * chart.y(value):.2f}%">{text(chart.text(value))}</span>'
        for value in chart.y_ticks()
    )
    unit = "bytes" if chart.text(2048) == "2.0 KiB" else "number"
    return f"""<figure>
<figcaption><b>{text(chart.title)}</b>{_legend(chart)}<output></output></figcaption>
<div class="frame"><div class="y">{"".join(y_axis)}</div>
<div class="plot" tabindex="0" role="group" aria-label="{text(chart.title)}: arrow keys read it"
 data-low="{chart.low:.6g}" data-high="{chart.high:.6g}"
 data-last="{chart.last}" data-kind="{unit}">
<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"
 aria-label="{text(chart.title)}, by step">{"".join(shapes)}</svg>
{"".join(dots)}<div class="pointer"></div></div></div>
<div class="x">{"".join(_x_tick(chart, step) for step in chart.x_ticks())}</div>
</figure>
"""


def histogram(bars: Sequence[tuple[str, int]], label: str) -> str:
    """Return columns with what they count below them; (what, how many)."""
    most = max((number for _, number in bars), default=0) or 1
    columns = (
        f'<div title="{text(what)}: {number:,}"><i style="height:{100 * number / most:.1f}%"></i>'
        f"<span>{text(what)}</span></div>"
        for what, number in bars
    )
    return f'<div class="bars" role="img" aria-label="{text(label)}">{"".join(columns)}</div>'


def _legend(chart: Chart) -> str:
    keys = (f'<span class="key {_kind(line)}">{text(line.label)}</span>' for line in chart.lines)
    return "".join(keys) if len(chart.lines) > 1 else ""


def _kind(line: Line) -> str:
    return f"{line.style} c{line.color % NUM_COLORS}"


def _x_tick(chart: Chart, step: int) -> str:
    end = ' class="end"' if chart.x(step) > 0.95 else ""
    return f'<span{end} style="left:{100 * chart.x(step):.2f}%">{step:,}</span>'


def _rule(chart: Chart, value: float) -> str:
    y = _y(chart, value)
    return f'<line class="rule" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"></line>'


def _seam(chart: Chart, step: int) -> str:
    x = f"{WIDTH * chart.x(step):.1f}"
    title = f"<title>resumed after step {step:,}</title>"
    return f'<line class="seam" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}">{title}</line>'


def _line(chart: Chart, line: Line) -> str:
    points = " ".join(f"{WIDTH * chart.x(s):.1f},{_y(chart, v)}" for s, v in line.points)
    label = text(line.label)
    return f'<polyline class="{_kind(line)}" points="{points}" data-label="{label}"></polyline>'


def _dots(chart: Chart, line: Line) -> str:
    """Return marks of points, as HTML: a stretched drawing would make them ovals."""
    shown = line.points if len(line.points) <= MAX_DOTS else line.points[-1:]
    places = (f"left:{100 * chart.x(s):.2f}%;bottom:{100 * chart.y(v):.2f}%" for s, v in shown)
    return "".join(f'<i class="dot c{line.color % NUM_COLORS}" style="{at}"></i>' for at in places)


def _y(chart: Chart, value: float) -> str:
    return f"{HEIGHT * (1 - chart.y(value)):.2f}"
