"""What became of the rows of a file."""

from __future__ import annotations

from collections.abc import Sequence

from peftkit.data.load import DataConfig
from peftkit.errors import DataError

MAX_NAMED = 5


def check_dropped(where: str, num_read: int, dropped: Sequence[str], config: DataConfig) -> None:
    """Refuse a file too many of whose rows have nothing to learn.

    Raises:
        DataError: None is left, or a larger share than `data.max_dropped` was dropped.
    """
    if len(dropped) < num_read and len(dropped) <= config.max_dropped * num_read:
        return
    raise DataError(
        f"Cannot use {where}: {len(dropped)} of {num_read} rows have nothing to learn, more than "
        f"data.max_dropped ({config.max_dropped:.0%}) allows.",
        found=f"Empty rows: {named(dropped)}",
        fix="Mend or remove these rows.",
    )


def named(sources: Sequence[str]) -> str:
    """Return "3 (a.jsonl:1, a.jsonl:5, a.jsonl:9)", at most MAX_NAMED of them."""
    if not sources:
        return "0"
    more = ", ..." if len(sources) > MAX_NAMED else ""
    return f"{len(sources):,} ({', '.join(sources[:MAX_NAMED])}{more})"
