"""How the rows of a step are cut into micro-batches: those that go through the model at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def split_micro_batches(
    rows: Sequence[Any],
    num_positions: Callable[[Sequence[Any]], int],
    max_rows: int,
    max_tokens: int | None = None,
    bucket_key: Callable[[Any], Any] | None = None,
) -> list[Sequence[Any]]:
    """Return rows in micro-batches of at most so many rows and tokens, padding included.

    They keep their order unless that has too many tokens. Then they are sorted, the longest first:
    rows of a length lie together, and where memory does not suffice, that shows at once. One row
    alone may have more tokens.

    Args:
        num_positions: Tokens of rows that go through the model at once, padding included.
        bucket_key: Rows of different kinds share no micro-batch.
    """
    if bucket_key is not None:
        groups: dict[Any, list[Any]] = {}
        for row in rows:
            groups.setdefault(bucket_key(row), []).append(row)
        return [
            part
            for group in groups.values()
            for part in split_micro_batches(group, num_positions, max_rows, max_tokens)
        ]
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
