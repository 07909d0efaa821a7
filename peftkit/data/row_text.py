"""The last response of a document, and its text in segments of targets and others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from peftkit.data.pack import IGNORE, Row


def last_answer_span(row: Row) -> tuple[int, int]:
    """Return the token indices [start, stop) of a document's last response."""
    stop = max(n for n, label in enumerate(row.labels) if label != IGNORE) + 1
    start = stop
    while start > 0 and row.labels[start - 1] != IGNORE:
        start -= 1
    return start, stop


def last_answer(tokenizer: Any, row: Row) -> tuple[list[int], str]:
    """Return the tokens before a document's last response, and the response's text."""
    start, stop = last_answer_span(row)
    answer = tokenizer.decode(row.input_ids[start:stop], skip_special_tokens=True)
    return list(row.input_ids[:start]), str(answer)


def labelled_segments(
    row: Row, text: Callable[[list[int]], str], name: str
) -> list[tuple[str, str]]:
    """Return a row's text in segments (label, text): `name` for targets, "" for others."""
    pairs = zip(row.input_ids, row.labels, strict=True)
    return [
        (name if is_target else "", text([token for token, _ in segment]))
        for is_target, segment in groupby(pairs, key=lambda pair: pair[1] != IGNORE)
    ]
