"""PEFT's `target_modules`: a list of dotted endings, or one regular expression for whole paths."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from peftkit.errors import AdapterError
from peftkit.files.safe_regex import fullmatches
from peftkit.files.strict_json import shown

ANY = "all-linear"


def check_targets(targets: Any, asked: str, name: str = "target_modules") -> None:
    """Check the type of `target_modules`, or of a field like it.

    Raises:
        AdapterError: It is neither null, a string, nor a list of strings.
    """
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        return
    if targets is not None and not isinstance(targets, str):
        raise AdapterError(
            asked,
            found=f"{name}: {shown(targets)}",
            fix="It is a list of module names, or one regular expression.",
        )


def targeted(paths: Iterable[str], targets: Any) -> list[str]:
    """Return those paths that `target_modules` names; none where it names no module itself.

    Raises:
        AdapterError: The pattern is invalid, or takes too long.
    """
    if isinstance(targets, list):
        return [path for path in paths if any(ends_with(path, target) for target in targets)]
    if isinstance(targets, str) and targets != ANY:
        return fullmatches(targets, list(paths))
    return []


def unmatched(targets: Any, paths: Collection[str]) -> list[str]:
    """Return the endings in `target_modules` that name none of `paths`."""
    if not isinstance(targets, list):
        return []
    return sorted(t for t in targets if not any(ends_with(path, t) for path in paths))


def shortest_endings(paths: Iterable[str], others: Collection[str]) -> list[str]:
    """Return the shortest dotted endings that name all of `paths` and none of `others`."""
    pending, chosen, length = set(paths), set(), 1
    while pending:
        for path in sorted(pending):
            ending = ".".join(path.split(".")[-length:])
            if ending == path or not any(ends_with(other, ending) for other in others):
                chosen.add(ending)
                pending.discard(path)
        length += 1
    return sorted(chosen)


def ends_with(path: str, ending: str) -> bool:
    """Tell whether a dotted path is, or ends with, another."""
    return path == ending or path.endswith("." + ending)
