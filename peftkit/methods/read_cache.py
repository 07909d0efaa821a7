"""A cache of keys and values that is read and never written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

Pair = tuple[Tensor, Tensor]
"""Keys and values (B, K, T, D)."""


class ReadCache(DynamicCache):
    """A read-only cache: returns the prefix with the new keys and values, and stores nothing.

    So a block can be recomputed in the backward pass, and no memory is held after a step.

    Attributes:
        given: Keys and values of the last call, by layer.
    """

    def __init__(self, config: Any, pairs: Sequence[Pair]) -> None:
        super().__init__(config=config)
        self.given: dict[int, Pair] = {}
        for index, (keys, values) in enumerate(pairs):
            super().update(keys, values, index)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        self.given[layer_idx] = key_states, value_states
        held: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if held is None or not held.is_initialized:
            return key_states, value_states
        return (
            torch.cat([held.keys, key_states], dim=-2),
            torch.cat([held.values, value_states], dim=-2),
        )


class _Never(dict[int, bool]):
    """EncoderDecoderCache.is_updated of a read-only cache: never set."""

    def __setitem__(self, key: int, value: bool) -> None:
        return None


def read_cache(stack: Any, pairs: Sequence[Pair]) -> tuple[ReadCache, Any]:
    """Return a cache of the pairs, and the cache object to pass to the stack."""
    decoder_cache = ReadCache(stack.config, pairs)
    if not stack.config.is_encoder_decoder:
        return decoder_cache, decoder_cache
    both = EncoderDecoderCache(decoder_cache, ReadCache(stack.config, []))
    both.is_updated = _Never()
    return decoder_cache, both
