"""Chooses the engine for a model."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from peftkit.execution.environment import free_now
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Engine, Limits, Request, Use
from peftkit.inference.plain import PlainEngine
from peftkit.inference.sampling import Sampling
from peftkit.model.modes import evaluating
from peftkit.tasks.length import num_virtual
from peftkit.train.sharding import is_sharded

CACHE_SHARE = 0.5
"""Of the memory that is free; slots may be twice as long as what is in them."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_16_BIT = 0.1
"""By how much logits may differ, as a share of their spread; of a wrong mask they differ by 1."""
LENGTHS = (9, 6)
"""Of the prompts that a model is asked with."""
TOP = 16
"""Tokens that are compared."""

_known: weakref.WeakKeyDictionary[Any, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def open_engine(
    model: Any, tokenizer: Any, limits: Limits | None = None, use: Use | None = None
) -> Engine:
    """Return an engine for a model, to be entered: `CachedEngine` if it can be, else plain.

    Args:
        limits: Its `tokens` are as many as fit into memory, unless given.
        use: Switches the adapters of a batch's rows.
    """
    limits = limits or Limits()
    if limits.tokens is None and not is_sharded(model):  # processes have to decide alike
        limits = replace(limits, tokens=tokens_that_fit(model))
    kind = CachedEngine if why_plain(model, tokenizer) is None else PlainEngine
    return kind(model, tokenizer, limits, use)


def tokens_that_fit(model: Any) -> int | None:
    """Return of how many tokens keys and values fit into memory; None if that is not known."""
    config, there = model.config.get_text_config(), free_now(model.device)
    of_all = getattr(config, "num_attention_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or of_all
    if there.memory is None or not (isinstance(heads, int) and isinstance(of_all, int)):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // of_all
    of_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    return int(CACHE_SHARE * there.usable) // of_token


def why_plain(model: Any, tokenizer: Any) -> str | None:
    """Return why a model's answers are made by transformers' own loop; None if they need not be.

    The model is asked for a few tokens, in pieces and whole, once.
    """
    if num_virtual(model):
        return "virtual tokens"
    config = model.config.get_text_config()
    known = _known.setdefault(model, {})
    if model.dtype not in known:
        known[model.dtype] = _by_its_words(model, config) or _by_trying(model, tokenizer, config)
    return known[model.dtype]


def _by_its_words(model: Any, config: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "an encoder and a decoder"
    names = inspect.signature(type(model).forward).parameters
    if not {"position_ids", "past_key_values", "logits_to_keep"} <= names.keys():
        return "positions of its own"
    can = getattr(type(model), "_can_set_attn_implementation", None)
    if not (can and can()):
        return "attention of its own"
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    if {one.get("rope_type") for one in ropes} & {"dynamic", "longrope"}:
        return "positions that depend on the longest row"
    layers = DynamicCache(config=config).layers
    if len(layers) != config.num_hidden_layers:
        return "layers that share a cache"
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        return f"a cache of {', '.join(sorted(kind.__name__ for kind in kinds))}"
    return None


def _by_trying(model: Any, tokenizer: Any, config: Any) -> str | None:
    """Compare the likeliest tokens, in pieces beside each other and by the model alone."""
    prompts = [
        [(3 + place) * (7 + size) % config.vocab_size for place in range(size)] for size in LENGTHS
    ]
    asked = Sampling(max_new_tokens=2, top_logprobs=TOP)
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE_16_BIT)
    try:
        with CachedEngine(model, tokenizer, Limits(prefill=4)) as engine:
            engine.ends = frozenset()
            found = [engine.submit(Request(ids, asked)) for ids in prompts]
            engine.run()
    except Exception as problem:  # a model's own way of saying that it takes no such cache
        return f"attention of its own ({type(problem).__name__}: {problem})"
    for ids, running in zip(prompts, found, strict=True):
        for number, chosen in enumerate(running.chosen):
            with evaluating(model):
                so_far = torch.tensor([[*ids, *running.ids[:number]]], device=model.device)
                logits = model(input_ids=so_far, use_cache=False).logits[0, -1].float()
            right = logits.log_softmax(-1).tolist()
            error = max(abs(right[token] - log_prob) for token, log_prob in chosen.top)
            if not error <= tolerance * float(logits.std()):
                return "attention of its own"
    return None
