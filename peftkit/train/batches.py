"""How the rows of a step are cut into micro-batches: those that go through the model at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens (data/pack.py), and counted so here."""


def num_tokens(row: Any) -> int:
    """Return a row's length in tokens, the decoder's beside the encoder's; 0 if it does not say."""
    return sum(_lengths(row))


def padded(*rows: Any) -> int:
    """Return how many tokens each of the rows takes in one batch, at least one.

    Of an encoder and a decoder that half counts which reads more: it is what a matrix product has
    as its rows.
    """
    longest = map(max, zip(*map(_lengths, rows), strict=True))
    return max(-(-max(longest) // MULTIPLE) * MULTIPLE, 1)


def _lengths(row: Any) -> tuple[int, int]:
    """Return how many tokens the model reads of a row, and how many a decoder of its own does."""
    return len(getattr(row, "input_ids", ())), getattr(row, "num_decoder_tokens", 0)


def cut(
    rows: Sequence[Any],
    num_positions: Callable[[Sequence[Any]], int],
    max_rows: int,
    max_tokens: int | None = None,
) -> list[Sequence[Any]]:
    """Return rows in micro-batches of at most so many rows and tokens, padding included.

    They keep their order unless that has too many tokens. Then they are sorted, the longest first:
    rows of a length lie together, and where memory does not suffice, that shows at once. One row
    alone may have more tokens.

    Args:
        num_positions: Tokens of rows that go through the model at once, padding included.
    """
    parts = [rows[start : start + max_rows] for start in range(0, len(rows), max_rows)]
    if max_tokens is None or all(num_positions(part) <= max_tokens for part in parts):
        return parts
    fitting: list[Sequence[Any]] = [[]]
    for row in sorted(rows, key=lambda row: num_positions([row]), reverse=True):
        part = [*fitting[-1], row]
        if len(part) == 1 or (len(part) <= max_rows and num_positions(part) <= max_tokens):
            fitting[-1] = part
        else:
            fitting.append([row])
    return fitting
