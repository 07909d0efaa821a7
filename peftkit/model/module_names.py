"""From a module's path to its role, and from the class of a fused layer's owner to its rows.

The order of the rows of a fused layer comes from the class that owns it (roles.py has those that
are known), the number and width of heads from that module and its config. They must add up to the
layer's number of rows; otherwise the layer is not split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from peftkit.model import roles as table
from peftkit.model.roles import HEAD_DIM, LAYOUTS, NUM_HEADS, NUM_KV_HEADS, Layout


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


def split_rows(
    kind: str,
    path: str,
    owner: nn.Module,
    configs: Sequence[object],
    in_features: int,
    out_features: int,
) -> tuple[int, dict[str, int]] | None:
    """Return how often the parts of a fused layer repeat along its rows, and role -> rows of each.

    Args:
        kind: The role of the whole: qkv, kv, gate_up; others are not fused.
        path: Of the layer.
        owner: The module that holds the layer and uses its output.
        configs: Of the owner, then of the model; each may be None.
        in_features, out_features: Of the layer.
    """
    layout = _layout(kind, owner)
    heads = _fact(NUM_HEADS, owner, *configs)
    totals: dict[str, int] = {}  # role -> rows in all, in the order of one repeat
    repeats = 0
    if kind == "kv" and path.endswith("kv_b_proj"):  # multi-head latent attention
        repeats = heads
        totals["k"] = heads * _fact(("qk_nope_head_dim",), owner)
        totals["v"] = heads * _fact(("v_head_dim",), owner)
    elif layout and kind == "qkv" and heads:
        head_dim = _fact(HEAD_DIM, owner, configs[0]) or in_features // heads
        num_kv = (out_features // head_dim - heads) // 2
        if num_kv not in {heads, *_facts(NUM_KV_HEADS, owner, *configs)}:
            return None
        rows = {"q": heads * head_dim, "k": num_kv * head_dim, "v": num_kv * head_dim}
        totals = {role: rows[role] for role in layout.order}
        repeats = layout.repeats or num_kv
    elif layout and kind in ("kv", "gate_up"):
        totals = dict.fromkeys(layout.order, out_features // 2)
        repeats = layout.repeats
    fits = repeats > 0 and all(n > 0 and n % repeats == 0 for n in totals.values())
    if not fits or sum(totals.values()) != out_features:
        return None
    return repeats, {role: n // repeats for role, n in totals.items()}


def _layout(kind: str, owner: nn.Module) -> Layout | None:
    """Return the known row order of the class that owns a fused layer, if any."""
    known = LAYOUTS.get(kind, {})
    for cls in type(owner).__mro__:
        if cls.__module__.startswith("transformers.models."):
            for name in (cls.__name__, cls.__module__.rpartition("modeling_")[2]):
                if name in known:
                    return known[name]
    return None


def _facts(names: Sequence[str], *sources: object) -> list[int]:
    """Return the given attributes that are positive numbers."""
    values = (getattr(source, name, None) for source in sources for name in names)
    return [value for value in values if isinstance(value, int) and value > 0]


def _fact(names: Sequence[str], *sources: object) -> int:
    return next(iter(_facts(names, *sources)), 0)
