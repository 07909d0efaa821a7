"""How a model is computed in training, in words for the run header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from peftkit.model.norms import num_fused
from peftkit.train.memory.blocks import Blocks

PREFIX = "peftkit_"
"""Names of our own attention functions."""


def paths(model: nn.Module, blocks: Blocks, of_task: Mapping[str, str]) -> str:
    """Return "attention: grouped; LoRA: 2 groups of 5 layers beside the base; blocks: compiled".

    Args:
        of_task: How the task computes what.
    """
    parts = []
    of_task = dict(of_task)
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    attention = of_task.pop("attention", found)
    if attention is not None:
        parts.append(f"attention: {str(attention).removeprefix(PREFIX)}")
    if (layers := _layers(model)) != "":
        parts.append(f"LoRA: {layers}")
    if fused := num_fused(model):
        parts.append(f"norms: {fused} fused")
    if blocks.blocks:
        how = "compiled" if blocks.compiled else "not compiled"
        ways = {
            "keep": "",
            "recompute": ", recomputed",
            "offload": ", recomputed, inputs offloaded",
        }
        parts.append(f"blocks: {how}{ways[blocks.activations]}")
    return "; ".join([*parts, *(f"{what}: {how}" for what, how in of_task.items())])


def _layers(model: nn.Module) -> str:
    """Say how many layers are computed in groups."""
    groups: list[Any] = [
        module.group
        for module in model.modules()
        if hasattr(module, "group") and module._parameters
    ]
    own, together = groups.count(None), {id(group): group for group in groups if group is not None}
    how = ", ".join(sorted({group.how for group in together.values()}))
    parts = [f"{len(together)} groups of {len(groups) - own} layers {how}"] if together else []
    return ", ".join(parts + ([f"{own} layers each on its own"] if own else []))
