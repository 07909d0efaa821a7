"""From a module's path to its role, by names alone (roles.py has the table)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from peftkit.model import roles as table


def tail(segments: Sequence[str]) -> list[str]:
    """Return the path segments after the block's number; an expert's number does not count."""
    for index in range(len(segments) - 2, 0, -1):
        if segments[index].isdigit() and segments[index - 1] != "experts":
            return list(segments[index + 1 :])
    return list(segments)


def side(path: str) -> str:
    """Return "projector", "vision", "audio", or "" for the rest of a model."""
    sides = {"projector": table.PROJECTOR, **table.TOWERS}
    return next((name for name, pattern in sides.items() if re.search(pattern, path)), "")


def split(role: str) -> tuple[str, str]:
    """Split a role into its context and the rest: ("cross_", "q")."""
    context = next((c for c in ("cross_", "shared_", "expert_") if role.startswith(c)), "")
    return context, role.removeprefix(context)


def linear_role(path: str) -> str:
    """Return the role of a linear layer; of a fused layer, its role as a whole."""
    segments = path.split(".")
    end = tail(segments)
    in_block = len(end) < len(segments)
    # a layer in a Sequential, or inside another kind of layer, has the name of that
    leaf = next((s for s in reversed(end) if not s.isdigit() and s != "linear"), end[-1])
    if not in_block or set(_before_numbers(segments)) & set(table.HEAD_SEGMENTS):
        outside = _role_outside(segments, leaf)
        if outside:
            return outside
    context = _context(end)
    if in_block and not context:  # ask the name of the numbered list
        context = _context(segments[len(segments) - len(end) - 2 :][:1])
    if context in table.CHOOSING:
        return context
    if context in ("attention", "cross"):
        role = table.ATTENTION_LEAVES.get(leaf, "other")
    elif not context and leaf in table.PLAIN_ATTENTION:
        role = table.ATTENTION_LEAVES[leaf]
    else:
        role = table.FFN_LEAVES.get(".".join(end[-2:])) or table.FFN_LEAVES.get(leaf, "other")
    prefixed = context in ("cross", "shared", "expert") and role != "other"
    return f"{context}_{role}" if prefixed else role


def _role_outside(segments: Sequence[str], leaf: str) -> str:
    """Return head or other for a layer outside of all blocks, "" if it is in an unnumbered one."""
    if set(_before_numbers(segments)) & set(table.HEAD_SEGMENTS):
        return "head"
    if re.fullmatch(table.HEAD_LEAF, leaf):
        return "head"
    if set(segments) & set(table.NOT_BLOCKS) or not _context(segments):
        return "other"
    return ""


def _before_numbers(segments: Sequence[str]) -> Sequence[str]:
    return segments[: next((i for i, s in enumerate(segments) if s.isdigit()), len(segments))]


def _context(segments: Sequence[str]) -> str:
    lowered = [segment.lower() for segment in segments]
    found = (c for c, pattern in table.CONTEXTS if any(re.search(pattern, s) for s in lowered))
    return next(found, "")
