"""The number of concurrent completions that fit beside a base, by its config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from peftkit.base.skeleton import untraced
from peftkit.execution.environment import GPU_SHARE, Environment
from peftkit.inference.budget import Footprint, cache_tokens, estimated_footprint, measured
from peftkit.inference.cache import slot_length
from peftkit.inference.cached_attention import CachedAttention, cached_attention
from peftkit.inference.open_engine import why_plain_class
from peftkit.planning.step import skeleton_of
from peftkit.recipe import Recipe


def num_completions(
    recipe: Recipe,
    config: Any,
    environment: Environment,
    dtype: torch.dtype,
    weights: int,
    lengths: tuple[int, ...],
) -> dict[int, int]:
    """Return the number of completions of each length, as the engine counts them.

    Empty if the config lacks the sizes.

    Args:
        weights: Bytes of the base.
    """
    size = _footprint(recipe, config, dtype)
    if size is None:
        return {}
    if environment.on_gpu:  # generation allocates once: it leaves less for fragments than a run
        environment = replace(environment, share=GPU_SHARE)
    tokens = cache_tokens(environment, size.token, taken=weights)
    return {length: tokens // (slot_length(length) + size.state_tokens) for length in lengths}


def _footprint(recipe: Recipe, config: Any, dtype: torch.dtype) -> Footprint | None:
    """Measure the engine's cache on a model without data, or estimate that of `PlainEngine`."""
    model = skeleton_of(recipe, config, dtype)
    if why_plain_class(model) is None:
        try:
            return _measured(model)
        except Exception:  # the class does not show whether its attention can use the cache
            pass
    return estimated_footprint(config.get_text_config(), dtype)


def _measured(model: Any) -> Footprint:
    attention = CachedAttention.of(model)
    for module in model.modules():
        if hasattr(module, "is_transposed"):  # experts, whose sizes depend on data
            module.forward = lambda hidden, *_: torch.zeros_like(hidden)
    with untraced(), cached_attention(model, attention):
        return measured(model, attention)
