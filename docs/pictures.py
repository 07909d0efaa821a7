"""Draw the picture of a run for docs/index.md: its loss curve and its answers before and after.

    python docs/pictures.py runs/orders      # writes docs/run-light.svg and docs/run-dark.svg
    python docs/pictures.py runs/orders --prompt 1

The run must have eval rows and train.sample_every.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from peftkit.figures import duration
from peftkit.report.chart import Chart, Line, charts, text
from peftkit.report.history import History, read_history
from peftkit.report.page import STYLE

HERE = Path(__file__).parent
WIDTH, HEIGHT = 960, 330
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 46, 92, 420, 190
SAMPLES_LEFT, LINE_CHARS, LINE_HEIGHT = 520, 56, 17
THEMES = {
    "light": {"ground": "#ffffff", "text": "#1b1f26", "soft": "#5c6675", "rule": "#dde1e7"},
    "dark": {"ground": "#14171c", "text": "#e6e9ee", "soft": "#9aa5b4", "rule": "#343b46"},
}
_LIGHT, _DARK = zip(*re.findall(r"--c\d: light-dark\((#\w+), (#\w+)\)", STYLE), strict=True)
COLORS = {"light": _LIGHT, "dark": _DARK}
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def picture(run: History, theme: str, prompt: int) -> str:
    """Return the picture as SVG, with the answers to prompt number `prompt`."""
    look, chart = THEMES[theme], charts([run])[0]
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{look["ground"]}"/>',
        write(LEFT - 22, 34, "What the model learned", 17, look["text"], bold=True),
        write(LEFT - 22, 56, summary(run), 12.5, look["soft"]),
        *curve(chart, look, COLORS[theme]),
        *answers(run, prompt, look, COLORS[theme]),
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{font}">\n{body}\n</svg>\n'


def summary(run: History) -> str:
    """Return one line with the rows, the steps and the duration of the run."""
    rows, took = run.started["num_rows"], duration(run.seconds)
    return f"{rows:,} rows, {run.step:,} steps in {took}"


def curve(chart: Chart, look: dict[str, str], colors: tuple[str, ...]) -> Iterator[str]:
    """Yield the elements of the loss chart, with axes and legend."""
    bottom = TOP + PLOT_HEIGHT
    for value, shown in chart.y_ticks():
        y = bottom - PLOT_HEIGHT * chart.y(value)
        yield f'<path d="M{LEFT} {y:.1f}h{PLOT_WIDTH}" stroke="{look["rule"]}"/>'
        yield write(LEFT - 6, y + 4, shown, 11, look["soft"], anchor="end")
    for step in chart.x_ticks():
        x = LEFT + PLOT_WIDTH * step / chart.last_step
        yield write(x, bottom + 17, f"{step:,}", 11, look["soft"], anchor="middle")
    yield write(LEFT + PLOT_WIDTH / 2, bottom + 36, "step", 11, look["soft"], anchor="middle")
    legend = LEFT + PLOT_WIDTH - 200
    for line in sorted(chart.lines, key=lambda line: line.style != "raw"):
        color = colors[line.color]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in places_of(chart, line))
        faint = ' opacity="0.35" stroke-width="1"' if line.style == "raw" else ' stroke-width="2"'
        yield f'<polyline points="{places}" fill="none" stroke="{color}"{faint}/>'
        if line.style == "raw":
            continue
        if line.style == "points":
            for x, y in places_of(chart, line):
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>'
        label = {"smoothed": "train loss"}.get(line.label, line.label)
        yield f'<path d="M{legend} {TOP + 8}h18" stroke="{color}" stroke-width="3"/>'
        yield write(legend + 24, TOP + 12, label, 12, look["text"])
        legend += 108


def places_of(chart: Chart, line: Line) -> list[tuple[float, float]]:
    """Return the coordinates of a line's points in the picture."""
    return [
        (LEFT + PLOT_WIDTH * step / chart.last_step, TOP + PLOT_HEIGHT * (1 - chart.y(value)))
        for step, value in line.points
    ]


def answers(
    run: History, number: int, look: dict[str, str], colors: tuple[str, ...]
) -> Iterator[str]:
    """Yield the prompt and the answers to it before and after training."""
    prompt = list(dict.fromkeys(str(line["prompt"]) for line in run.samples))[number]
    samples = [line for line in run.samples if line["prompt"] == prompt]
    first, last = samples[0], samples[-1]
    y = TOP - 2
    for title, words, color in (
        ("prompt", last_turn(prompt), look["soft"]),
        ("before", str(first["completion"]), colors[1]),
        (f"after {last['step']} steps", str(last["completion"]), colors[2]),
    ):
        yield write(SAMPLES_LEFT, y, title, 12, color, bold=True)
        shown = textwrap.wrap(" ".join(words.split()), LINE_CHARS)[:3]
        for number, line in enumerate(shown):
            y += LINE_HEIGHT
            more = " ..." if number == 2 and len(" ".join(words.split())) > 3 * LINE_CHARS else ""
            yield write(SAMPLES_LEFT, y, line + more, 12, look["text"], font=MONO)
        y += 1.7 * LINE_HEIGHT


def last_turn(prompt: str) -> str:
    """Return the last user message of a conversation, or the whole prompt if it is not one."""
    return prompt.rpartition("\nuser\n")[2].removesuffix("\nassistant")


def write(
    x: float,
    y: float,
    words: str,
    size: float,
    color: str,
    *,
    anchor: str = "start",
    bold: bool = False,
    font: str = "",
) -> str:
    """Return a line of text as an SVG element."""
    more = ' font-weight="600"' * bold + (f' font-family="{font}"' if font else "")
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}"{more}>{text(words)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompt", type=int, default=0, help="number of the prompt to show")
    args = parser.parse_args()
    history = read_history(args.run)
    for name in THEMES:
        text_of = picture(history, name, args.prompt)
        (HERE / f"run-{name}.svg").write_text(text_of, encoding="utf-8")
