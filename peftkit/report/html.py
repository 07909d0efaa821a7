"""Pieces of HTML. Every text of a run goes through `text` on its way into a page.

Charts are inline SVG: the curves stretch with the page, the text beside them does not. The curves'
own numbers are not there twice: the script under the pointer reads them off the lines.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from peftkit.report.chart import Chart, Line

WIDTH, HEIGHT = 1000, 300
"""Units of the drawing, which is stretched."""
NUM_COLORS = 8
MAX_DOTS = 60
"""Of more points only the last has a dot."""


def text(value: object) -> str:
    """Return a value as HTML text or as an attribute's value, without what no HTML file can hold:
    lone surrogates and control characters."""
    known = str(value).encode("utf-8", "replace").decode("utf-8")
    clean = (c if c in "\n\t" or ord(c) >= 32 else "\N{REPLACEMENT CHARACTER}" for c in known)
    return html.escape("".join(clean))


def table(
    columns: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """Return a table of texts, in a box that scrolls by itself where the page is narrow.

    Args:
        numbers: All columns but the first are aligned to the right.
    """
    head = "".join(f"<th>{text(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    kind = ' class="numbers"' if numbers else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="scroll"><table{kind}>{top}<tbody>{body}</tbody></table></div>'


def paragraph(value: object, kind: str = "soft") -> str:
    """Return a paragraph of text; nothing if there is none."""
    return f'<p class="{kind}">{text(value)}</p>' if value else ""


def code(value: object) -> str:
    """Return a block of code or of a file's text."""
    return f"<pre><code>{text(value)}</code></pre>"


def histogram(bars: Sequence[tuple[int, int]], label: str) -> str:
    """Return columns with what they count below them; (what, how many)."""
    most = max((number for _, number in bars), default=0) or 1
    columns = (
        f'<div title="{what:,}: {number:,}"><i style="height:{100 * number / most:.1f}%"></i>'
        f"<span>{what:,}</span></div>"
        for what, number in bars
    )
    return f'<div class="bars" role="img" aria-label="{text(label)}">{"".join(columns)}</div>'


def drawn(chart: Chart) -> str:
    """Return a chart as a figure."""
    lines = sorted(chart.lines, key=lambda line: line.style != "raw")
    shapes = [_rule(chart, value) for value in chart.y_ticks()]
    shapes += [_seam(chart, step) for step in chart.seams]
    shapes += [_line(chart, line) for line in lines]
    dots = [_dots(chart, line) for line in lines if line.style == "points"]
    y_axis = (
        f'<span style="bottom:{100 * chart.y(value):.2f}%">{text(chart.text(value))}</span>'
        for value in chart.y_ticks()
    )
    keys = (f'<span class="key {_kind(line)}">{text(line.label)}</span>' for line in chart.lines)
    legend = "".join(keys) if len(chart.lines) > 1 else ""
    unit = "bytes" if chart.text(2048) == "2.0 KiB" else "number"
    return f"""<figure>
<figcaption><b>{text(chart.title)}</b>{legend}<output></output></figcaption>
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
