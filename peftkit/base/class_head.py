"""The head of a model of classes: which modules it is, and how a new one begins.

A new head is the same whatever was drawn before, in whatever precision and on whatever device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

SEED = 20_210_617
"""Of every new head."""
POOLER = "pooler"
"""Part of some encoders that only heads of classes use; models of masked words come without it."""


def head_of_classes(model: Any) -> tuple[str, ...]:
    """Return the paths of what a model has beside its backbone, which is where the blocks are."""
    return tuple(
        name
        for name, child in model.named_children()
        if child is not model.base_model
        and not any(isinstance(module, nn.ModuleList) for module in child.modules())
        and any(True for _ in child.parameters())
    )


def owners(names: Iterable[str], head: Iterable[str]) -> dict[str, str]:
    """Return for each parameter that belongs to a head the path that it is trained under.

    Args:
        names: Of parameters.
        head: What `head_of_classes` says.
    """
    found = {}
    for name in names:
        segments = name.split(".")
        if POOLER in segments[:-1]:
            found[name] = ".".join(segments[: segments.index(POOLER) + 1])
        for path in head:
            if name.startswith(f"{path}."):
                found[name] = path
    return found


@torch.no_grad()
def renew(model: nn.Module, names: Iterable[str]) -> None:
    """Draw the matrices among these parameters again; biases become 0, scales of norms 1."""
    generator = torch.Generator().manual_seed(SEED)
    std = getattr(model.config, "initializer_range", None) or 0.02
    for name in sorted(names):
        parameter = model.get_parameter(name)
        if parameter.ndim > 1:
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
