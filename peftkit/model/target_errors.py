"""The error for targets that match no layer, with reasons, similar names and the model's roles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import cast

from torch import nn

from peftkit.errors import TargetError, did_you_mean, first_few
from peftkit.model import roles as table
from peftkit.model.places import ModelWeight, linear_shape, stacked_shape, walk
from peftkit.model.roles import is_role, matches

MAX_LISTED = 24
"""Layers that the error lists for an unknown architecture."""


def no_match(
    model: nn.Module,
    places: list[ModelWeight],
    failed: Mapping[str, ModelWeight | None],
    stacks: bool,
) -> TargetError:
    """Return the error for failed targets.

    Args:
        failed: Target to the fused weight that it may be a part of, or None.
        stacks: Whether stacks of experts can be adapted.
    """
    name = type(model).__name__
    quoted = ", ".join(f"'{target}'" for target in failed)
    problem = f"no linear layer matches target{'s' if len(failed) > 1 else ''} {quoted} in {name}."
    if not failed:
        problem = f"no targets are given for {name}."
    reasons = [reason for item in failed.items() if (reason := _reason(model, *item))]
    usable = [place for place in places if stacks or not place.is_stack]
    guesses = [_guess(usable, target) for target in failed]
    hints = " ".join(dict.fromkeys(filter(None, guesses)))
    details = "\n".join([*reasons, " ".join(filter(None, [_roles_found(places), hints]))])
    source = getattr(getattr(model, "config", None), "_name_or_path", "") or "MODEL"
    return TargetError(
        problem, found=details, fix=f"List every layer with: peftkit inspect {source}"
    )


def _guess(places: list[ModelWeight], target: str) -> str:
    """Return "Did you mean 'x'?" of a role of this model or the name of a layer, or ""."""
    present = dict.fromkeys(name for place in places for name in place.names)
    if is_role(target):  # a valid role that this model lacks
        near = next((name for name in present if name.endswith(f"_{target}")), "")
        return f"Did you mean '{near}'?" if near else ""
    leaves = {place.path.rpartition(".")[2] for place in places if not place.is_embedding}
    return did_you_mean(target, [*present, *table.GROUPS, *sorted(leaves)])


def _reason(model: nn.Module, target: str, fused: ModelWeight | None) -> str:
    """Return one line on why a target matches nothing, or ""."""
    if fused is not None:
        return (
            f"'{target}' may be in {fused.path}, fused in an order that peftkit does not know: "
            f"target the whole as '{fused.names[0]}'."
        )
    if is_role(target) or is_role(target.partition(".")[2]):
        return ""
    others = Counter(type(m).__name__ for path, m, _ in walk(model) if matches(path, target))
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(4))
        return f"'{target}' matches modules, but none of them is linear: {kinds}."
    if re.search(r"[\\^$|+()]", target):
        return (
            f"'{target}' looks like a regular expression; patterns use shell wildcards: * ? [0-3]."
        )
    return ""


def _roles_found(places: list[ModelWeight]) -> str:
    """Return "Roles found: q, k, v (32 layers), head."; without roles, a list of the layers."""
    counts: dict[str, set[str]] = {}
    for place in places:
        for name in place.names:
            counts.setdefault(name, set()).add(place.block)
    if not counts.keys() - {"other", "head", "embed", "pos_embed", "projector"}:
        return _layers_found(places)
    grouped: dict[int, list[str]] = {}
    for name in sorted(counts, key=_order):
        grouped.setdefault(len(counts[name] - {""}), []).append(name)
    texts = []
    for count, names in grouped.items():
        layers = f" ({count} layer{'s' if count > 1 else ''})" if count else ""
        texts.append(", ".join(names) + layers)
    return f"Roles found: {', '.join(texts)}."


def _order(name: str) -> tuple[bool, int]:
    side, _, role = name.partition("_")
    plain = side not in table.TOWERS
    return not plain, table.ROLES.index(name if plain else role)


def _layers_found(places: list[ModelWeight]) -> str:
    lines: Counter[str] = Counter()
    for place in places:
        if not place.is_embedding:
            shape = (
                stacked_shape(place.module, cast(str, place.parameter))[1:]
                if place.is_stack
                else linear_shape(place.module)
            )
            path = re.sub(r"(?<![^.])\d+(?=\.|$)", "*", place.path)
            lines[f"{path} ({shape[0]} -> {shape[1]})"] += 1
    if not lines:
        return "It has no linear layer."
    listed = first_few((f"{line} x {count}" for line, count in lines.items()), MAX_LISTED, "\n  ")
    return f"No roles are known in it. Its linear layers:\n  {listed}"
