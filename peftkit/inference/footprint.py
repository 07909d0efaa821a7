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
from peftkit.inference.cached_attention import CachedAttention, Prefill

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


def footprint(model: Any, attention: CachedAttention) -> Footprint:
    """Return the footprint of a model in which an attention is registered.

    It is measured once per dtype, by a forward pass.
    """
    known = _footprints.setdefault(model, {})
    dtype = compute_dtype(model)
    if dtype not in known:
        span, token = Span([0], None), torch.zeros(1, 1, dtype=torch.long)
        attention.run(model, Prefill([(span, 1)]), token, token)
        known[dtype] = footprint_of(span)
    return known[dtype]


def footprint_of(span: Span) -> Footprint:
    """Return the footprint by a span of one token."""
    layers = [keys.nbytes + values.nbytes for keys, values in span.layers.values()]
    states = sum(state.nbytes for state in span.states.values())
    return Footprint(sum(layers) + max(layers, default=0), states)


def known_footprint(model: Any) -> Footprint:
    """Return the footprint that an engine of this model has measured."""
    return _footprints[model][compute_dtype(model)]
