"""Every error a user can meet says three things: what was asked, what was found, what to do.

The exit codes are the command line's: 2 the input is wrong, 1 something broke while it was right.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class PeftkitError(ValueError):
    """The user's input is wrong.

    Args:
        asked: One sentence: what was asked and did not work.
        found: What was found instead, one line or several.
        fix: What to do, one line or several.
    """

    exit_code = 2

    def __init__(self, asked: str, *, found: str = "", fix: str = "") -> None:
        self.asked, self.found, self.fix = asked, found, fix
        details = [line for part in (found, fix) for line in part.splitlines()]
        super().__init__("\n".join([asked, *(f"  {line}" for line in details)]))


def silence(error: Exception) -> None:
    """Mark an error that another process of the run has reported."""
    error.is_silent = True  # type: ignore[attr-defined]


def is_silent(error: Exception) -> bool:
    """Whether another process has reported this error."""
    return getattr(error, "is_silent", False)


class ConfigError(PeftkitError):
    """A recipe or an override is not valid."""


class BaseError(PeftkitError):
    """The base model cannot be found, read, or quantised as requested."""


class TargetError(PeftkitError):
    """A role or pattern does not fit this model."""


class DataError(PeftkitError):
    """A data file, row or field is not usable."""


class AdapterError(PeftkitError):
    """An adapter file is unreadable, or does not belong to this model."""


class MergeError(PeftkitError):
    """The adapter cannot be merged as requested."""


class OutputError(PeftkitError):
    """The output path is not writable, is taken, or its disk is full."""


class CheckpointError(PeftkitError):
    """No checkpoint can be resumed exactly."""


class RunError(PeftkitError):
    """The input was right and the run broke: non-finite numbers, a full disk, no memory."""

    exit_code = 1


class DiskFullError(RunError):
    """The disk is full; a retry works once there is room."""


class EndedTogetherError(RunError):
    """What ended one process of a run, raised by all of them."""


def first_few(items: Iterable[str], limit: int, separator: str = "\n") -> str:
    """Return the first items, joined, and how many more there are: "a, b, and 3 more"."""
    items = list(items)
    more = [f"and {len(items) - limit:,} more"] if len(items) > limit else []
    return separator.join([*items[:limit], *more])


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" for the option nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f"Did you mean '{near[0]}'?" if near else ""


def neighbours(path: Path, pattern: str = "*/") -> str:
    """List what is in the folder where `path` should be, and suggest the nearest name.

    Args:
        path: What is not there.
        pattern: Of the names to list; one that ends in a slash means folders.
    """
    folder = path.parent
    if not folder.is_dir():
        return f"The folder '{folder}' is not there either."
    # Before Python 3.11 a pattern that ends in a slash matches files too.
    names = sorted(
        entry.name
        for entry in folder.glob(pattern)
        if not entry.name.startswith(".") and (entry.is_dir() or not pattern.endswith("/"))
    )
    where = f"'{folder}'" if folder != Path(".") else "This folder"
    listed = first_few(names, 8, ", ")
    if not names:
        return ""
    stems = {name.removesuffix(path.suffix): name for name in names}  # alike in more than the end
    near = did_you_mean(path.stem, stems)
    hint = near and f"Did you mean '{stems[near.split(chr(39))[1]]}'?"
    return f"{where} holds: {listed}. {hint}".rstrip()
