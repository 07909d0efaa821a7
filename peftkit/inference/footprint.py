"""The memory of the engine's cache, measured by a pass over one token.

Latent attention computes keys from a smaller latent, layers have heads of different sizes, and
hybrids have states: no formula over a config counts all of them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peftkit.execution.plan import compute_dtype
from peftkit.inference.cached_attention import CachedAttention
from peftkit.inference.states import PassStates, PrefillStates, States

_footprints: weakref.WeakKeyDictionary[Any, dict[torch.dtype, Footprint]]
_footprints = weakref.WeakKeyDictionary()


class Footprint(NamedTuple):
    """Bytes that the cache allocates.

    Attributes:
        token: Keys and values of a token; at least 1, since a state space without attention has
            none. The largest layer counts twice, since its copy exists while the cache grows.
        row: The states of a row, which do not grow.
    """

    token: int
    row: int = 0

    @property
    def state_tokens(self) -> int:
        """Number of tokens that need as much memory as the states of a row."""
        return -(-self.row // self.token)


class _Measurement:
    """A forward pass over one token that counts the bytes of its keys and values."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.row: States = {}
        self.states: PassStates = PrefillStates([self.row])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.layers.append(keys.nbytes + values.nbytes)
        self._size = values.shape[-1]

    def attend(self, layer: int, query: Tensor, layer_mask: Any, scores: Any) -> Tensor:
        return query.new_zeros((*query.shape[:3], self._size))


@torch.no_grad()
def measured(model: Any, attention: CachedAttention) -> Footprint:
    """Run one token through a model, with data or without, in which an attention is registered."""
    now, token = _Measurement(), torch.zeros(1, 1, dtype=torch.long)
    attention.run(model, now, token, token)
    states = sum(state.nbytes for state in now.row.values())
    return Footprint(max(sum(now.layers) + max(now.layers, default=0), 1), states)


def footprint(model: Any, attention: CachedAttention) -> Footprint:
    """Return what `measured` returns, measured once per dtype."""
    known = _footprints.setdefault(model, {})
    dtype = compute_dtype(model)
    if dtype not in known:
        known[dtype] = measured(model, attention)
    return known[dtype]


def known_footprint(model: Any) -> Footprint:
    """Return the footprint that an engine of this model has measured."""
    return _footprints[model][compute_dtype(model)]
