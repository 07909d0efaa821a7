"""Which output rows of a fused linear layer belong to which role.

The order of the rows comes from the class that owns the layer (roles.py has those that are known),
the number and width of heads from that module and its config. They must add up to the layer's
number of rows; otherwise the layer is not split.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from peftkit.model.roles import HEAD_DIM, LAYOUTS, NUM_HEADS, NUM_KV_HEADS, Layout


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
