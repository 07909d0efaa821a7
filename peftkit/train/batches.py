"""How the rows of a step are cut into micro-batches: those that go through the model at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens (data/pack.py), and counted so here."""


def num_tokens(row: Any) -> int:
    """Return a row's length in tokens, 0 if it does not say."""
    return len(getattr(row, "input_ids", ()))


def padded(row: Any) -> int:
    """Return how many tokens a row takes in a batch of its own; one that says none takes one."""
    return max(-(-num_tokens(row) // MULTIPLE) * MULTIPLE, 1)


def cut(rows: Sequence[Any], max_rows: int, max_tokens: int | None = None) -> list[Sequence[Any]]:
    """Return rows in micro-batches of at most so many rows and tokens, padding included.

    They keep their order unless that has too many tokens. Then they are sorted, the longest first:
    rows of a length lie together, and where memory does not suffice, that shows at once. One row
    alone may have more tokens.
    """
    parts = [rows[start : start + max_rows] for start in range(0, len(rows), max_rows)]
    if max_tokens is None or all(
        len(part) * max(map(padded, part)) <= max_tokens for part in parts
    ):
        return parts
    ordered = sorted(rows, key=padded, reverse=True)
    parts, start = [], 0
    while start < len(ordered):
        fit = max(max_tokens // padded(ordered[start]), 1)
        parts.append(ordered[start : start + min(fit, max_rows)])
        start += len(parts[-1])
    return parts
