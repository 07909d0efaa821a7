"""Match untrusted regular expressions in bounded time.

Python's engine backtracks: "(a+)+b" takes minutes on thirty letters. A pattern without exponential
backtracking is matched directly; other patterns run in a subprocess with a timeout.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from peftkit.errors import AdapterError
from peftkit.files.strict_json import shown

MAX_LENGTH = 10_000
SECONDS = 2.0

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\d*\}")
_OPTIONAL = re.compile(r"(?<![(*+}])\?")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_BACKREFERENCE = re.compile(r"\\[1-9]|\(\?P=")
_CHILD = """
import json, re, sys
method, flags, searches = json.load(sys.stdin)
match = getattr(re, method)
found = [match(p, text, flags) is not None for p, texts in searches for text in texts]
json.dump(found, sys.stdout)
"""


def is_simple(pattern: str) -> bool:
    """Return whether matching takes at most about cubic time in the length of the text."""
    plain = _ESCAPED.sub("x", pattern)
    return (
        len(_UNBOUNDED.findall(plain)) <= 2
        and len(_OPTIONAL.findall(plain)) <= 4
        and plain.count("(") <= 4  # each of which may hold alternatives
        and not _REPEATED_GROUP.search(plain)
        and not _BACKREFERENCE.search(pattern)
    )


def is_pattern(pattern: str) -> bool:
    """Return whether a text is a valid regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def fullmatches(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that a regular expression matches in full.

    Raises:
        AdapterError: The pattern is invalid, too long, or takes too long.
    """
    message = f"cannot use the pattern {shown(pattern)}"
    if len(pattern) > MAX_LENGTH:
        raise AdapterError(message, found=f"It is longer than {MAX_LENGTH:,} characters.")
    try:
        matcher = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as problem:
        raise AdapterError(message, found=f"It is not a regular expression: {problem}.") from None
    if is_simple(pattern):
        return [name for name in names if matcher.fullmatch(name)]
    try:
        matches = _in_child("fullmatch", [(pattern, names)], SECONDS)
    except TimeoutError:
        fix = "Write it without repetitions inside repetitions."
        raise AdapterError(
            message, found=f"It takes more than {SECONDS:g} seconds.", fix=fix
        ) from None
    except ValueError as problem:
        raise AdapterError(message, found=str(problem)) from None
    return [name for name, is_match in zip(names, matches, strict=True) if is_match]


def searched(pairs: Sequence[tuple[str, str]], seconds: float, *, flags: int = 0) -> list[bool]:
    """Search each (pattern, text) in a subprocess; return whether each pattern matches.

    Python's engine holds the interpreter lock, so a thread cannot end a search.

    Raises:
        TimeoutError: The searches take longer than `seconds`.
        ValueError: A pattern is invalid.
    """
    searches = [(pattern, [text]) for pattern, text in pairs]
    return _in_child("search", searches, seconds, flags) if pairs else []


def _in_child(
    method: str, searches: Sequence[tuple[str, Sequence[str]]], seconds: float, flags: int = 0
) -> list[bool]:
    """Apply a function of `re` to each (pattern, texts), in a subprocess; see `searched`."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([method, int(flags), searches]),
            capture_output=True,
            check=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"regular expressions took more than {seconds:g} seconds") from None
    except subprocess.CalledProcessError as problem:
        raise ValueError(problem.stderr.strip().rpartition("\n")[2]) from None
    matches: list[bool] = json.loads(done.stdout)
    return matches
