"""The memory of the engine's cache: bytes of a token and a row, and the tokens that it allocates.

The bytes are measured by a pass over one token. Latent attention computes keys from a smaller
latent, layers have heads of different sizes, and hybrids have states: no formula over a config
counts all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from peftkit.execution.environment import Environment
from peftkit.execution.plan import compute_dtype
from peftkit.inference.cache import power_of_two
from peftkit.inference.cached_attention import CachedAttention
from peftkit.inference.states import PassStates, PrefillStates, States

CACHE_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""Share of the free memory for keys and values. Prompts and sampling need the rest, and on a CPU
also unpacked weights (`ready.COPY_SHARE`)."""

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

    mask = None

    def __init__(self) -> None:
        self.tokens = self.positions = torch.zeros(1, 1, dtype=torch.long)
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
    now = _Measurement()
    attention.run(model, now)
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


def cache_tokens(environment: Environment, size: int, taken: int = 0) -> int:
    """Return for how many tokens keys and values fit.

    Args:
        size: Bytes of a token.
        taken: Bytes of the free memory that are reserved for other uses.
    """
    share = CACHE_SHARE["cuda" if environment.on_gpu else "cpu"]
    return int(share * max(environment.usable - taken, 0)) // size


def estimated_footprint(config: Any, dtype: torch.dtype) -> Footprint | None:
    """Return the bytes of a token's keys and values by a config; None: it lacks the sizes."""
    sizes = [_bytes_in_layer(layer, dtype) for layer in _layers_with_keys(config)]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return None
    return Footprint(sum(known) + max(known))


def _layers_with_keys(config: Any) -> list[Any]:
    """Return the config of each layer with keys; in some models their heads differ."""
    if not (layers := cache_layers(config)):
        return []
    configs = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    if len(layers) != len(configs):
        return list(configs)
    pairs = zip(configs, layers, strict=True)
    return [one for one, layer in pairs if isinstance(layer, DynamicLayer)]


def cache_layers(config: Any) -> list[Any]:
    """Return the layers of transformers' cache; none for a config of several models, as BLT's."""
    return DynamicCache(config=config).layers if hasattr(config, "num_hidden_layers") else []


def _bytes_in_layer(config: Any, dtype: torch.dtype) -> int | None:
    query_heads = getattr(config, "num_attention_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    if not (isinstance(heads, int) and isinstance(query_heads, int)):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return int(2 * heads * size * dtype.itemsize)


class CacheBudget(NamedTuple):
    """The tokens for which a cache allocates memory after all its prompts have slots.

    Attributes:
        limit: Maximum of `num_tokens`; None: no limit.
        state_tokens: Tokens that need as much memory as the states of a slot.
        held: Tokens outside of slots: prefixes, prompts and completions that may be continued,
            with their states.
        slots: Number and length of the slots of each arena, by the power of two of their final
            length.
        lengths: Final slot lengths of all running completions.
    """

    limit: int | None
    state_tokens: int
    held: int
    slots: Mapping[int, tuple[int, int]]
    lengths: tuple[int, ...]

    def plus(self, *lengths: int, held: int = 0) -> CacheBudget:
        """Return the budget with further completions and tokens outside of slots."""
        return self._replace(held=self.held + held, lengths=self.lengths + lengths)

    def shrunk(self) -> CacheBudget:
        """Return the budget after empty slots are freed."""
        return self._replace(slots={})

    @property
    def num_tokens(self) -> int:
        total = self.held
        for size in {*map(power_of_two, self.lengths), *self.slots}:
            lengths = [length for length in self.lengths if power_of_two(length) == size]
            num_slots, longest = self.slots.get(size, (0, 0))
            num_slots, longest = max(num_slots, len(lengths)), max(longest, *lengths, 0)
            total += num_slots * (longest + self.state_tokens)
        return total

    @property
    def fits(self) -> bool:
        return self.limit is None or self.num_tokens <= self.limit

    def max_slots(self, size: int, capacity: int) -> int | None:
        """Return the maximum slots of at least a capacity in the arena of a size; None: no limit.

        The arena may grow beyond its completions by the tokens that are left.
        """
        if self.limit is None:
            return None
        lengths = [length for length in self.lengths if power_of_two(length) == size]
        slot = max(capacity, *lengths) + self.state_tokens
        return len(lengths) + (self.limit - self.num_tokens) // slot
