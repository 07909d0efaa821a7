"""The memory of the engine's cache, measured by a pass over one token.

Latent attention computes keys from a smaller latent, layers have heads of different sizes, and
hybrids have states: no formula over a config counts all of them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from peftkit.execution.plan import compute_dtype
from peftkit.inference.cache import Span
from peftkit.inference.cached_attention import CachedAttention, Prefill, registered
from peftkit.inference.ready import on_device
from peftkit.model.modes import evaluating

_footprints: weakref.WeakKeyDictionary[Any, dict[torch.dtype, Footprint]]
_footprints = weakref.WeakKeyDictionary()


class Footprint(NamedTuple):
    """Bytes that the cache allocates.

    Attributes:
        token: Keys and values of a token. The largest layer counts twice, since its copy exists
            while the cache grows.
        row: The states of a row, which do not grow.
    """

    token: int
    row: int = 0

    @property
    def state_tokens(self) -> int:
        """Number of tokens that need as much memory as the states of a row."""
        return -(-self.row // max(self.token, 1))


def footprint(model: Any) -> Footprint:
    """Return the footprint of a model that a `CachedEngine` can run, measured once per dtype."""
    known = _footprints.setdefault(model, {})
    dtype = compute_dtype(model)
    if dtype not in known:
        known[dtype] = measured(model)
    return known[dtype]


def state_tokens(model: Any) -> int:
    """Return `Footprint.state_tokens` of a model."""
    return footprint(model).state_tokens


@torch.no_grad()
def measured(model: Any) -> Footprint:
    """Measure a model's footprint by a forward pass."""
    span, attention = Span([0], None), CachedAttention.of(model)
    token = torch.zeros(1, 1, dtype=torch.long)
    with on_device(model.device), evaluating(model), registered(model, attention):
        attention.run(model, Prefill([(span, 1)]), token, token)
    layers = [keys.nbytes + values.nbytes for keys, values in span.layers.values()]
    states = sum(state.nbytes for state in span.states.values())
    return Footprint(sum(layers) + max(layers, default=0), states)
