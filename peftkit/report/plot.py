"""A curve in a terminal, of braille dots: 2 x 4 of them a character.

Our own, because it is short: a plotting library would bring its own screen, colours and sizes, and
this one has to stand inside a picture that is redrawn several times a second.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from peftkit.report.figures import metric

EMPTY = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
LABEL = 9
EVAL = "•"


def plot(
    curve: Sequence[tuple[int, float]],
    marks: Sequence[tuple[int, float]] = (),
    columns: int = 64,
    lines: int = 7,
) -> list[tuple[str, str, str]]:
    """Return a curve over steps as lines, the highest values first.

    Args:
        curve: (step, value), in the order of steps; drawn as the mean of each column of dots.
        marks: More points, such as evaluations, each drawn as a bullet.
        columns, lines: Characters of the curve itself.

    Returns:
        Of each line the label of the axis, the curve, and what is written behind it: the marks'
        legend. Empty where there is nothing to draw.
    """
    columns, lines = max(columns, 8), max(lines, 2)
    means = _means(curve, 2 * columns)
    marks = [(step, value) for step, value in marks if math.isfinite(value)]
    values = [value for _, value in means] + [value for _, value in marks]
    if not means:
        return []
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    last = max(curve[-1][0], *(step for step, _ in marks), 1) if marks else max(curve[-1][0], 1)
    cells = [[EMPTY] * columns for _ in range(lines)]
    top = 4 * lines - 1

    def height(value: float) -> int:
        return round(top * (value - low) / spread)

    before: int | None = None
    for x, value in means:
        here = height(value)
        start = here if before is None or abs(here - before) <= 1 else before
        for y in range(min(start, here), max(start, here) + 1):  # joined to the column before
            cells[lines - 1 - y // 4][x // 2] |= DOTS[3 - y % 4][x % 2]
        before = here
    drawn = [[chr(cell) for cell in row] for row in cells]
    for step, value in marks:
        column = min(columns - 1, columns * step // last)
        drawn[lines - 1 - height(value) // 4][column] = EVAL
    labels = {0: high, lines - 1: low}
    return [
        (
            f"{metric('', labels[n]) if n in labels else '':>{LABEL}} ",
            "".join(row),
            ("  loss" + (f"  {EVAL} eval" if marks else "")) if n == 0 else "",
        )
        for n, row in enumerate(drawn)
    ]


def _means(curve: Sequence[tuple[int, float]], columns: int) -> list[tuple[int, float]]:
    """Return (column, mean) of each column of dots that a step falls into."""
    if not curve:
        return []
    last = max(curve[-1][0], 1)
    found = []
    edges = [bisect_left(curve, (last * n // columns + 1, -math.inf)) for n in range(columns + 1)]
    for column in range(columns):
        span = [value for _, value in curve[edges[column] : edges[column + 1]]]
        finite = [value for value in span if math.isfinite(value)]
        if finite:
            found.append((column, sum(finite) / len(finite)))
    return found
