"""Errors for users: each has a problem, the actual state (`found`), and a fix.

Exit codes of the command line: 2 for wrong input, 1 for a failure with valid input.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path


class PeftkitError(ValueError):
    """The user's input is wrong.

    Args:
        problem: The request that failed, in one sentence.
        found: The actual state, in one or several lines.
        fix: What to do, in one or several lines.
    """

    exit_code = 2

    def __init__(self, problem: str, *, found: str = "", fix: str = "") -> None:
        self.problem, self.found, self.fix = problem, found, fix
        details = [*found.splitlines(), *fix.splitlines()]
        super().__init__("\n".join([problem, *(f"  {line}" for line in details)]))

    @property
    def asked(self) -> str:
        """The former name of `problem` (deprecated)."""
        return self.problem


def silence(error: Exception) -> None:
    """Mark an error that another process of the run has reported."""
    error.is_silent = True  # type: ignore[attr-defined]


def is_silent(error: Exception) -> bool:
    """Whether another process has reported this error."""
    return getattr(error, "is_silent", False)


class ConfigError(PeftkitError):
    """A recipe or an override is not valid.

    Attributes:
        lines: (line, message) of each error in a text; line 0: it has none.
    """

    lines: tuple[tuple[int, str], ...] = ()


class BaseError(PeftkitError):
    """The base model cannot be found, read, or quantised as requested."""


class TargetError(PeftkitError):
    """A role or pattern of `targets` does not fit this model."""


class DataError(PeftkitError):
    """A data file, row or field is not usable."""


class AdapterError(PeftkitError):
    """An adapter file is unreadable, or does not belong to this model."""


class MergeError(PeftkitError):
    """The adapter cannot be merged as requested."""


class OutputError(PeftkitError):
    """The output path is not writable, exists already, or its disk is full."""


class CheckpointError(PeftkitError):
    """No checkpoint can be resumed exactly."""


class RunError(PeftkitError):
    """The input is valid and the run failed: non-finite numbers, a full disk, no memory."""

    exit_code = 1


class DiskFullError(RunError):
    """The disk is full; a retry works once there is room."""


class EndedTogetherError(RunError):
    """The error that ended one process of a run, raised by all of them."""


def install_extra(name: str) -> str:
    """Return the command that installs an optional part; no package index has peftkit."""
    return f"In the checkout of peftkit: pip install -e '.[{name}]'"


def first_few(items: Iterable[str], limit: int, separator: str = "\n") -> str:
    """Join the first items, and count the rest: "a, b, and 3 more"."""
    items = list(items)
    rest = [f"and {len(items) - limit:,} more"] if len(items) > limit else []
    return separator.join([*items[:limit], *rest])


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" for the option nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f"Did you mean '{near[0]}'?" if near else ""


def is_url(path: str | Path) -> bool:
    """Return whether a missing path is a URL, such as s3://bucket/rows.jsonl.

    A `Path` has one slash of the two after the scheme.
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def neighbours(path: Path, pattern: str = "*/") -> str:
    """List the folder of a missing path, and suggest the nearest name.

    Args:
        path: The missing file or folder.
        pattern: Glob of the names to list; a trailing slash lists folders.
    """
    folder = path.parent
    if is_url(path):
        return "It is a URL, and URLs are not read. Download it first."
    if not folder.is_dir():
        return f"The folder '{folder}' does not exist either."
    # Before Python 3.11, a pattern with a trailing slash also matches files.
    names = sorted(
        entry.name
        for entry in folder.glob(pattern)
        if not entry.name.startswith(".") and (entry.is_dir() or not pattern.endswith("/"))
    )
    where = f"'{folder}'" if folder != Path(".") else "This folder"
    if not names:
        return ""
    stems = {name.removesuffix(path.suffix): name for name in names}  # a shared suffix is no match
    near = did_you_mean(path.stem, stems)
    hint = near and f"Did you mean '{stems[near.split(chr(39))[1]]}'?"
    return f"{where} contains: {first_few(names, 8, ', ')}. {hint}".rstrip()
