"""Charts as HTML with inline SVG: the curves stretch with the page, the text beside them does not.

The curves' own numbers are not there twice: the script under the pointer reads them off the lines.
"""

from __future__ import annotations

from peftkit.report.chart import Chart, Line
from peftkit.report.html import Html, element, joined

WIDTH, HEIGHT = 1000, 300
"""Units of the drawing, which is stretched."""
NUM_COLORS = 8


def drawn(chart: Chart) -> Html:
    """Return a chart as a figure."""
    lines = sorted(chart.lines, key=lambda line: line.style != "raw")
    shapes = [
        *(_rule(chart, value) for value in chart.y_ticks()),
        *(_seam(chart, step) for step in chart.seams),
        *(_line(chart, line) for line in lines),
    ]
    svg = element(
        "svg",
        shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{chart.title}, by step",
    )
    y_axis = [
        element("span", chart.text(value), style=f"bottom:{100 * chart.y(value):.2f}%")
        for value in chart.y_ticks()
    ]
    x_axis = [
        element(
            "span",
            f"{step:,}",
            style=f"left:{100 * chart.x(step):.2f}%",
            cls="end" if chart.x(step) > 0.95 else None,
        )
        for step in chart.x_ticks()
    ]
    plot = element(
        "div",
        svg,
        [_dots(chart, line) for line in lines if line.style == "points"],
        element("div", cls="pointer"),
        cls="plot",
        data_low=f"{chart.low:.6g}",
        data_high=f"{chart.high:.6g}",
        data_last=chart.last,
        data_kind="bytes" if chart.text(2048) == "2.0 KiB" else "number",
    )
    return element(
        "figure",
        element("figcaption", element("b", chart.title), _legend(chart), element("output")),
        element("div", element("div", y_axis, cls="y"), plot, cls="frame"),
        element("div", x_axis, cls="x"),
    )


def histogram(bars: list[tuple[str, int]], label: str) -> Html:
    """Return counts as horizontal-less columns with their numbers below; (what, how many)."""
    most = max((number for _, number in bars), default=0) or 1
    columns = [
        element(
            "div",
            element("i", style=f"height:{100 * number / most:.1f}%"),
            element("span", text),
            title=f"{text}: {number:,}",
        )
        for text, number in bars
    ]
    return element("div", columns, cls="bars", role="img", aria_label=label)


def _legend(chart: Chart) -> Html:
    if len(chart.lines) < 2:
        return Html("")
    return joined(
        element("span", line.label, cls=f"key {line.style} c{line.color % NUM_COLORS}")
        for line in chart.lines
    )


def _rule(chart: Chart, value: float) -> Html:
    y = _y(chart, value)
    return element("line", cls="rule", x1=0, x2=WIDTH, y1=y, y2=y)


def _seam(chart: Chart, step: int) -> Html:
    x = f"{WIDTH * chart.x(step):.1f}"
    title = element("title", f"resumed after step {step:,}")
    return element("line", title, cls="seam", x1=x, x2=x, y1=0, y2=HEIGHT)


def _line(chart: Chart, line: Line) -> Html:
    text = " ".join(f"{WIDTH * chart.x(s):.1f},{_y(chart, v)}" for s, v in line.points)
    kind = f"{line.style} c{line.color % NUM_COLORS}"
    return element("polyline", cls=kind, points=text, data_label=line.label)


def _dots(chart: Chart, line: Line) -> Html:
    """Return marks of points, which a stretched drawing would make ovals; none of very many."""
    shown = line.points if len(line.points) <= 60 else line.points[-1:]
    return joined(
        element(
            "i",
            cls=f"dot c{line.color % NUM_COLORS}",
            style=f"left:{100 * chart.x(step):.2f}%;bottom:{100 * chart.y(value):.2f}%",
        )
        for step, value in shown
    )


def _y(chart: Chart, value: float) -> str:
    return f"{HEIGHT * (1 - chart.y(value)):.2f}"
