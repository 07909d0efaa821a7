"""Grids of which one cell of several is asked in `make test`, and all in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def spread(cells: Iterable[Any], one_of: int) -> list[Any]:
    """Return cells of which each n-th is fast; no factor of a side of the grid spreads evenly."""
    return [
        pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=pytest.mark.slow)
        if number % one_of
        else cell
        for number, cell in enumerate(cells)
    ]
