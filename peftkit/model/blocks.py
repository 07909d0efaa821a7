"""The transformer blocks of a model, wherever they stand in it."""

from __future__ import annotations

from torch import nn

from peftkit.model import roles as table
from peftkit.model.places import find_places, unwrap_adapter, walk


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of each transformer block, in order, on all sides of the model.

    A block is the innermost numbered module that holds both attention and a feed-forward part, or
    a neighbour of such a one in the same list. In a model that has none (a state-space model), the
    numbered modules of its outermost lists are the blocks.
    """
    kinds = {"attention": (*table.ATTENTION, *table.CROSS_ATTENTION), "ffn": table.FFN_LIKE}
    found: dict[str, set[str]] = {}
    lists = [
        (path, module)
        for path, module, _ in walk(model)
        if isinstance(module, nn.ModuleList | nn.Sequential) and path
    ]
    for place in find_places(model):
        kind = next((k for k, roles in kinds.items() if place.roles[0] in roles), "")
        for path, _ in lists:
            if place.path.startswith(f"{path}."):
                number = place.path[len(path) + 1 :].partition(".")[0]
                found.setdefault(f"{path}.{number}", set()).add(kind)
    full = {path.rpartition(".")[0] for path, has in found.items() if {*kinds} <= has}
    full = {path for path in full if not any(other.startswith(f"{path}.") for other in full)}
    if not full:
        holding = {path.rpartition(".")[0] for path in found}
        full = {p for p in holding if not any(p.startswith(f"{other}.") for other in holding)}
    return [
        (f"{path}.{name}", unwrap_adapter(child))
        for path, module in lists
        if path in full
        for name, child in module.named_children()
    ]
