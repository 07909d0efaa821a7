"""The transformer blocks of a model, and the attention and feed-forward sublayers of each.

They are found by roles, not by names. The last module of a sublayer returns the sublayer's output
before dropout, norms, scales and the residual: a linear layer (o, mixer_out, down) or, in a mixture
of experts, the module with all experts and their router. Cross-attention is a separate sublayer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from torch import nn

from peftkit.model import roles as table
from peftkit.model.places import (
    ModelWeight,
    find_places,
    is_linear,
    linear_shape,
    stacked_shape,
    unwrap_adapter,
    walk,
)

RECOMPUTABLE = "GradientCheckpointingLayer"
"""Name of transformers' class of blocks that can be recomputed; it is not imported here."""

STREAMED = "block_stream"
"""Attribute of a model whose blocks' weights are streamed from main memory."""

SHARDED = "is_sharded_base"
"""Attribute of a model whose blocks' weights are sharded over processes."""

NORM_AFTER = r"post_(feed_?forward|ffn|mlp)"
"""Pattern for the name of a norm on the feed-forward output (Gemma 2, OLMo 2, GLM 4)."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model's weights are sharded over processes (base/sharding.py)."""
    return hasattr(model, SHARDED)


def is_streamed(model: nn.Module) -> bool:
    """Return whether a model's blocks are streamed from main memory (base/streaming.py)."""
    return hasattr(model, STREAMED)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of each transformer block, in order, towers included.

    A block is the innermost numbered module with both attention and a feed-forward part, or a
    neighbour of one in the same list. In a model without such modules (a state-space model) the
    blocks are the numbered modules of its outermost lists.
    """
    attention = (*table.ATTENTION, *table.MIXERS, *table.CROSS_ATTENTION)
    kinds = {"attention": attention, "ffn": table.FFN_LIKE}
    kinds_of: dict[str, set[str]] = {}
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
                kinds_of.setdefault(f"{path}.{number}", set()).add(kind)
    full = {path.rpartition(".")[0] for path, has in kinds_of.items() if {*kinds} <= has}
    full = {path for path in full if not any(other.startswith(f"{path}.") for other in full)}
    if not full:
        holding = {path.rpartition(".")[0] for path in kinds_of}
        full = {p for p in holding if not any(p.startswith(f"{other}.") for other in holding)}
    return [
        (f"{path}.{name}", unwrap_adapter(child))
        for path, module in lists
        if path in full
        for name, child in module.named_children()
    ]


_OUTPUTS = ("o", "mixer_out", "cross_o")
_SPARSE = (*table.EXPERTS, *table.SHARED, "router", "shared_router")


@dataclass(frozen=True, slots=True)
class Sublayer:
    """A part of a block that adds its output to the residual stream.

    Attributes:
        block: Path of the block.
        path: Path of its last module.
        reads: Path of a module that reads the sublayer's input; "" for attention, or if unknown.
    """

    block: str
    kind: Literal["attention", "ffn"]
    path: str
    reads: str = ""


def recomputable_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that transformers can recompute in the backward pass, in order.

    These are the innermost instances of transformers' class for such blocks.
    """
    inside = [block for child in model.children() for block in recomputable_blocks(child)]
    if inside or not any(cls.__name__ == RECOMPUTABLE for cls in type(model).__mro__):
        return inside
    return [model]


def feed_forward_modules(model: nn.Module) -> list[nn.Module]:
    """Return the dense feed-forward modules of blocks that are exactly one sublayer.

    Modules followed by a norm in the block are left out, because the norm needs their output.
    """
    modules = []
    for part in find_sublayers(model):
        path = _around((part.reads, part.path)) if part.kind == "ffn" and part.reads else ""
        inside = path.startswith(f"{part.block}.") and part.path != part.reads
        names = [name for name, _ in model.get_submodule(part.block).named_children()]
        if inside and not any(re.search(NORM_AFTER, name) for name in names):
            modules.append(model.get_submodule(path))
    return modules


def find_sublayers(model: nn.Module) -> list[Sublayer]:
    """Return the sublayers of all blocks, block by block, towers included.

    Experts and a dense network in one block without a common module are two sublayers.
    """
    places, sublayers = find_places(model), []
    for block, _ in blocks(model):
        inside = [place for place in places if place.path.startswith(f"{block}.")]
        ends = [place.path for place in inside if place.roles[0] in _OUTPUTS]
        sublayers += [Sublayer(block, "attention", path) for path in ends]
        sublayers += _feed_forward(block, inside)
    return sublayers


def width_of(end: nn.Module) -> int:
    """Return the number of output features of a sublayer's last module."""
    if is_linear(end):
        return linear_shape(end)[1]
    down = next(p for p in find_places(end) if p.roles[0].endswith("down"))  # of any expert
    if down.parameter is None:
        return linear_shape(down.module)[1]
    return stacked_shape(down.module, down.parameter)[2]


def _feed_forward(block: str, inside: list[ModelWeight]) -> list[Sublayer]:
    """Return the feed-forward sublayers of a block, from its weights."""
    sublayers, dense = [], [place for place in inside if place.roles[0] in table.FFN]
    if experts := [place.path for place in inside if place.roles[0] in table.EXPERTS]:
        sparse = _around(place.path for place in inside if place.roles[0] in _SPARSE)
        if not sparse.startswith(f"{block}."):
            sparse = _around(experts)
            dense += [place for place in inside if place.roles[0] in table.SHARED]
        sublayers.append(Sublayer(block, "ffn", sparse, sparse))
    ends = [place for place in dense if place.roles[0].endswith("down")]
    for end in ends:
        # gate and up both read the sublayer's input; of several, take the nearest of the context
        context = table.split(end.roles[0])[0]
        first = [
            place.path
            for place in dense
            if place not in ends and table.split(place.roles[0])[0] == context
        ]
        reads = max(first, key=lambda path: len(_around((path, end.path))), default="")
        sublayers.append(Sublayer(block, "ffn", end.path, reads))
    return sublayers


def _around(paths: Iterable[str]) -> str:
    """Return the path of the innermost module that contains all paths."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len({*names}) == 1, levels))
