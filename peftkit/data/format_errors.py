"""Errors for rows of an unknown format, and for rows that cannot be used."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from peftkit.data.records import Record
from peftkit.errors import DataError, first_few

MAX_LISTED = 5


def unknown_fields(record: Record, where: str) -> DataError:
    """Return the error for a first row whose fields match no format."""
    prompt, completion = [*record.fields, "question", "answer"][:2]
    return DataError(
        f"Cannot detect the format of {where}.",
        found=f"{record.source} has the fields: {', '.join(record.fields) or 'none'}.",
        fix="Accepted: messages; conversations; instruction + output (input); question + answer; "
        "prompt + completion; text.\nOr name the fields with prompt and completion:\n"
        f"--set 'task.prompt={prompt}' --set 'task.completion={completion}'",
    )


def bad_rows(problems: Sequence[str], total: int, name: str, where: str, fix: str) -> DataError:
    """Return the error that counts the unusable rows and lists the first few.

    If there are more, a file in the folder for temporary files lists all of them.
    """
    listed = first_few(problems, MAX_LISTED)
    if len(problems) > MAX_LISTED:
        name_of_file = re.sub(r"[^\w.-]+", "-", Path(where).name) or "data"
        prefix = f"peftkit-bad-rows-{name_of_file}-"
        with (
            suppress(OSError),
            tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", errors="replace", prefix=prefix, suffix=".txt", delete=False
            ) as file,
        ):
            file.write("\n".join(problems) + "\n")
            listed += f"\nAll are listed in {file.name}"
    return DataError(
        f"Cannot use {len(problems)} of {total} rows of {where} (format '{name}').",
        found=listed,
        fix=fix,
    )
