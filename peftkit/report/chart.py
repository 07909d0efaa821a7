"""HTML of a page: its elements, and charts of curves over steps.

All text of a run is escaped by `text`. A chart is inline SVG: the curves stretch with the page, the
text next to them does not. The script of the page reads the values under the pointer from the
lines.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from peftkit.figures import metric, metric_name
from peftkit.report.history import Curve, History, smoothed

SPANS = 500
"""Number of spans of a line, each reduced to its minimum and maximum."""
WIDTH, HEIGHT = 1000, 300
"""Size of the stretched drawing in its units."""
NUM_COLORS = 8
MOST_FIGURES = 6
MAX_DOTS = 60
"""Largest number of points with a dot each; with more points only the last has one."""
TITLES = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "peak_bytes": "Peak memory",
}
SMOOTH = ("learning_rate", "peak_bytes")
"""Curves that need no smoothing."""
Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart.

    Attributes:
        label: Label in the legend. color: Index of a colour.
        style: raw: faint, behind the other lines; points: each point is marked.
    """

    label: str
    points: Sequence[Point]
    color: int
    style: Literal["raw", "line", "points"] = "line"


@dataclass(frozen=True)
class Chart:
    """Lines over steps.

    Attributes:
        name: Name of the curve. seams: Steps at which the run was resumed.
    """

    title: str
    name: str
    lines: Sequence[Line]
    seams: Sequence[int] = ()

    @cached_property
    def span(self) -> tuple[float, float]:
        """Range of the y axis, without the lowest and the highest hundredth of raw values."""
        clean = [value for line in self.lines if line.style != "raw" for _, value in line.points]
        raw = sorted(v for line in self.lines if line.style == "raw" for _, v in line.points)
        inner = raw[len(raw) // 100 : len(raw) - len(raw) // 100]
        ends = [*clean, *inner[:1], *inner[-1:]]
        low, high = min(ends), max(ends)
        if 0 < low < 0.5 * high:
            low = 0.0
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        return (0.0 if low == 0 else low - margin), high + margin

    @cached_property
    def last_step(self) -> int:
        """The end of the x axis."""
        return max(1, *(line.points[-1][0] for line in self.lines if line.points))

    def y(self, value: float) -> float:
        """Return the height of a value from 0 (bottom) to 1; outliers are clamped."""
        low, high = self.span
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def y_ticks(self) -> list[tuple[float, str]]:
        """Return round values for the y axis, with enough digits to distinguish them."""
        ticks = round_ticks(*self.span)
        for digits in range(MOST_FIGURES):
            texts = [metric(self.name, value, digits) for value in ticks]
            if len(set(texts)) == len(ticks):
                break
        return list(zip(ticks, texts, strict=True))

    def x_ticks(self) -> list[int]:
        """Return round steps for the x axis."""
        return [int(step) for step in round_ticks(0, self.last_step) if step.is_integer()]


def round_ticks(low: float, high: float, number: int = 4) -> list[float]:
    """Return about `number` round values between `low` and `high`, for an axis."""
    width = high - low
    if not (math.isfinite(width) and width > 0):
        return [low]
    power = 10.0 ** math.floor(math.log10(width / number))
    steps = [factor * power for factor in (1, 2, 2.5, 5, 10)]
    step = next((step for step in steps if width / step <= number + 0.5), steps[-1])
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def charts(runs: Sequence[History]) -> list[Chart]:
    """Return the charts of runs: one run in full detail, several overlaid."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    of_eval, of_task = ([n for n in names if n.startswith(p)] for p in ("eval/", "train/"))
    drawings = []
    for name in dict.fromkeys(["loss", *of_eval, *of_task, *TITLES]):
        title = TITLES.get(name) or ": ".join(map(metric_name, name.split("/"))).capitalize()
        lines = list(_lines(runs, name))
        if name == "loss":
            lines += _lines(runs, "eval/loss")
        has_course = name == "loss" or any(
            len(line.points) > 1 and any(value for _, value in line.points) for line in lines
        )
        if lines and has_course and name != "eval/loss":
            drawings.append(Chart(title, name, lines, runs[0].seams if len(runs) == 1 else ()))
    return drawings


def _lines(runs: Sequence[History], name: str) -> Iterator[Line]:
    """Yield the lines of a curve: if it is noisy, the raw and the smoothed values."""
    is_alone, is_eval = len(runs) == 1, name.startswith("eval/")
    for color, run in enumerate(runs):
        curve = run.curves[name]
        if not curve or (name == "peak_bytes" and not any(curve.values())):
            continue
        if is_eval:
            label = "eval" * (name == "eval/loss") if is_alone else f"{run.name}, eval"
            yield Line(label, points(curve), color + is_alone, "points")
        elif name in SMOOTH:
            yield Line("" if is_alone else run.name, points(curve), color)
        else:
            yield Line("each step" if is_alone else "", points(curve), color, "raw")
            yield Line("smoothed" if is_alone else run.name, points(smoothed(curve)), color)


def points(curve: Curve) -> list[Point]:
    """Return the minimum and the maximum of each of SPANS spans of a curve, and its ends."""
    pairs = list(curve.items())
    if len(pairs) <= 2 * SPANS:
        return pairs
    size = math.ceil(len(pairs) / SPANS)
    spans = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    ends = {pick(span, key=lambda point: point[1]) for span in spans for pick in (min, max)}
    return sorted({pairs[0], *ends, pairs[-1]})


def render_chart(chart: Chart) -> str:
    """Return a chart as an HTML figure."""
    lines = sorted(chart.lines, key=lambda line: line.style != "raw")
    y_ticks = [(HEIGHT * (1 - chart.y(value)), label) for value, label in chart.y_ticks()]
    rules = (f"M0 {y:.2f}H{WIDTH}" for y, _ in y_ticks)
    seams = (f"M{WIDTH * step / chart.last_step:.1f} 0V{HEIGHT}" for step in chart.seams)
    y_axis = (f'<span style="top:{y / HEIGHT:.2%}">{text(label)}</span>' for y, label in y_ticks)
    x_axis = (
        f"<span{' class=end' * (step > 0.95 * chart.last_step)} "
        f'style="left:{step / chart.last_step:.2%}">{step:,}</span>'
        for step in chart.x_ticks()
    )
    labelled = [line for line in chart.lines if line.label]
    keys = (f"<span {_kind(line, 'key')}>{text(line.label)}</span>" for line in labelled)
    low, high = chart.span
    return f"""<figure>
<figcaption><b>{text(chart.title)}</b>{"".join(keys)}<output></output></figcaption>
<div class="frame"><div class="y">{"".join(y_axis)}</div>
<div class="plot" data-low="{low:.6g}" data-high="{high:.6g}"
 data-last="{chart.last_step}" data-kind="{"bytes" if chart.name == "peak_bytes" else "number"}">
<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"
 aria-label="{text(chart.title)}, by step"><path class="rule" d="{"".join(rules)}"></path>
<path class="seam" d="{"".join(seams)}"></path>
{"".join(_polyline(chart, line) for line in lines)}</svg>
{"".join(_dots(chart, line) for line in lines)}<div class="pointer"></div></div></div>
<div class="x">{"".join(x_axis)}</div>
</figure>
"""


def _polyline(chart: Chart, line: Line) -> str:
    width = WIDTH / chart.last_step
    places = (f"{width * step:.1f},{HEIGHT * (1 - chart.y(v)):.2f}" for step, v in line.points)
    label = text(line.label)
    return f'<polyline {_kind(line)} points="{" ".join(places)}" data-label="{label}"></polyline>'


def _dots(chart: Chart, line: Line) -> str:
    """Return the marks of points as HTML, since the stretched SVG would distort them."""
    if line.style != "points":
        return ""
    marked = line.points if len(line.points) <= MAX_DOTS else line.points[-1:]
    places = (f"left:{step / chart.last_step:.2%};bottom:{chart.y(v):.2%}" for step, v in marked)
    return "".join(f"<i {_kind(line, 'dot', place)}></i>" for place in places)


def _kind(line: Line, name: str = "", place: str = "") -> str:
    """Return the HTML attributes for the style and colour of a line."""
    return f'class="{name} {line.style}" style="--c:var(--c{line.color % NUM_COLORS});{place}"'


def text(value: object) -> str:
    """Return a value as HTML text, or as the value of an attribute.

    Lone surrogates and control characters are replaced, since HTML cannot represent them.
    """
    valid = str(value).encode("utf-8", "replace").decode("utf-8")
    clean = (c if c in "\n\t" or ord(c) >= 32 else "\N{REPLACEMENT CHARACTER}" for c in valid)
    return html.escape("".join(clean))


def table(
    columns: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """Return a table in a box that scrolls horizontally on a narrow page; "" without rows.

    Args:
        numbers: Align all columns but the first to the right.
    """
    head = "".join(f"<th>{text(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return ""
    kind = ' class="numbers"' if numbers else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="scroll"><table{kind}>{top}<tbody>{body}</tbody></table></div>'


def paragraph(value: object, kind: str = "soft") -> str:
    """Return a paragraph of text; "" for an empty one."""
    return f'<p class="{kind}">{text(value)}</p>' if value else ""


def code(value: object) -> str:
    """Return a block of code or of a file's text; "" for an empty one."""
    return f"<pre><code>{text(value)}</code></pre>" if value else ""


def histogram(bars: Sequence[tuple[int, int]], label: str) -> str:
    """Return a histogram with a bar for each (lower edge, number), labelled by the edges."""
    highest = max((number for _, number in bars), default=0) or 1
    columns = (
        f'<div title="{edge:,}: {number:,}"><i style="height:{100 * number / highest:.1f}%"></i>'
        f"<span>{edge:,}</span></div>"
        for edge, number in bars
    )
    return f'<div class="bars" role="img" aria-label="{text(label)}">{"".join(columns)}</div>'
