"""What became of the rows of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peftkit.data.rows import StoredRows
from peftkit.errors import DataError, first_few
from peftkit.settings import DataConfig

MAX_NAMED = 5
NO_TEMPLATE = (
    "The base has no chat template: prompts become '### Instruction: ...', as Stanford Alpaca's. "
    "data.chat_template: chatml, or a .jinja file, gives it one."
)


def check_dropped(rows: StoredRows, data: DataConfig, drops: Mapping[str, str]) -> None:
    """Refuse a file too many of whose rows have nothing to learn.

    Args:
        drops: Why rows are dropped, and what may be done instead; see `RowEncoder.drops`.

    Raises:
        DataError: None is left, or a larger share than `data.max_dropped` was dropped.
    """
    dropped = {why: rows.dropped(number) for number, why in enumerate(drops)}
    number = sum(map(len, dropped.values()))
    if not len(rows):
        asked = f"Cannot learn from {rows.where}: no row has a token to learn."
    elif number / rows.num_read > data.max_dropped:
        asked = (
            f"Cannot use {rows.where}: {number} of {rows.num_read} rows have nothing to learn, "
            f"more than data.max_dropped ({data.max_dropped:.0%}) allows."
        )
    else:
        return
    there = {why: sources for why, sources in dropped.items() if sources}
    found = "\n".join(f"{why.capitalize()}: {named(sources)}" for why, sources in there.items())
    fix = ", ".join([*(drops[why] for why in there), "or remove these rows."])
    raise DataError(asked, found=found, fix=fix[:1].upper() + fix[1:])


def named(sources: Sequence[str]) -> str:
    """Return "3 (a.jsonl:1, a.jsonl:5, a.jsonl:9)", at most MAX_NAMED of them."""
    if not sources:
        return "0"
    return f"{len(sources):,} ({first_few(sources, MAX_NAMED, ', ')})"


def off_prompt(where: str, number: int) -> str:
    """Return what to say of rows whose answers begin otherwise than generation starts them."""
    return (
        f"{where}: in {number:,} rows the answer does not begin right after the chat template's "
        "generation prompt (it may open a <think> that the rows lack). Generation will start "
        "otherwise than training did; data.chat_template can change that."
    )
