"""Feed-forward layers of recomputed blocks, some tokens at a time (kernels/tiled.py)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.kernels.tiled import tiled
from peftkit.model.blocks import feed_forward_modules
from peftkit.model.places import FrozenWrapper

TILE = 4096
"""Tokens computed at a time, at least: fewer leave matrix products idle, and unpack 4-bit weights
too often."""
MOST_TILES = 16
LONG = 2 * TILE
"""Tokens from which on there are tiles: a tile's last product is made once more, 5 % of a step."""


class Tiles:
    """The feed-forward layers of a model; while they are tiled, each has a `forward` of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = feed_forward_modules(model)

    def set(self, wanted: bool) -> None:
        """Compute them in tiles from here on, or as they are written."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
            if wanted:
                module.forward = functools.partial(_forward, module)


def _forward(module: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a module, in tiles where a row is long."""
    run: Any = functools.partial(type(module).forward, module)
    plain = args or kwargs or not isinstance(x, Tensor) or x.dim() != 3
    if plain or x.shape[1] < LONG or not torch.is_grad_enabled():
        return run(x, *args, **kwargs)
    wrappers = [part for part in module.modules() if isinstance(part, FrozenWrapper)]
    trained = list(dict.fromkeys(p for wrapper in wrappers for p in wrapper.trained_parameters()))
    if not (trained or x.requires_grad):
        return run(x)
    drops = (part for part in module.modules() if isinstance(part, nn.Dropout))
    draws = any(part.training and part.p > 0 for part in drops)
    tokens = max(TILE, -(-x.shape[1] // MOST_TILES))
    return tiled(run, x, trained, tokens, draws=draws)
