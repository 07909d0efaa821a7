"""The engine of a model: `CachedEngine` if a trial finds its logits right, else `PlainEngine`.

Shapes: T tokens of a prompt.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from peftkit.events import Fallback
from peftkit.execution.environment import free_now
from peftkit.execution.gpu_support import gpu_fallbacks
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.plan import ExecutionPlan, compute_dtype
from peftkit.forward.compat import missing_arguments
from peftkit.forward.compiler import no_compiler, uncompiled
from peftkit.forward.noise import Trial
from peftkit.inference.budget import (
    Footprint,
    cache_layers,
    cache_tokens,
    estimated_footprint,
    known_footprint,
)
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import (
    AnswerTooLarge,
    Completion,
    Engine,
    Limits,
    OnFewer,
    Request,
    Use,
)
from peftkit.inference.plain_engine import PlainEngine
from peftkit.inference.ready import on_device
from peftkit.inference.recorder import unrecorded, why_not_recorded
from peftkit.inference.sampling import Sampling
from peftkit.inference.states import has_states
from peftkit.kernels import checked, packed_product
from peftkit.kernels.device import PINNING, pinned_empty
from peftkit.kernels.fused import TRITON
from peftkit.model.blocks import is_sharded
from peftkit.model.modes import evaluating
from peftkit.model.places import num_virtual

LENGTHS = (9, 6)
"""Of the prompts that a model is tried with, in pieces."""
PADDED_LENGTHS = (9, 6, 1)
"""Of the prompts that a model with states is tried with, in one padded pass."""
NEW_TOKENS = 9
"""Tokens after each prompt: enough to decode two rows together, and on a GPU to replay a recorded
step (`recorder.EAGER_STEPS`)."""
TOP = 16
"""Likeliest tokens that are compared."""

CACHE_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,  # a layer that is only feed-forward
}
"""Layers of transformers' caches whose methods the engine's cache has."""

_reasons: weakref.WeakKeyDictionary[Any, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def open_engine(
    model: Any,
    tokenizer: Any,
    limits: Limits | None = None,
    use: Use | None = None,
    on_fewer: OnFewer | None = None,
) -> Engine:
    """Return an engine for a model, a context manager: `CachedEngine` if possible.

    Args:
        limits: By default `tokens` are as many as fit into memory.
        use: Switches the model to the adapters of a batch's rows.
        on_fewer: By default a warning is logged.
    """
    limits = limits or Limits()
    if limits.tokens is None and not is_sharded(model):  # all processes must decide alike
        limits = replace(limits, tokens=tokens_that_fit(model, tokenizer))
    kind = CachedEngine if why_plain(model, tokenizer) is None else PlainEngine
    return kind(model, tokenizer, limits, use, on_fewer)


def tokens_that_fit(model: Any, tokenizer: Any, *, left: float = 0.0) -> int | None:
    """Return for how many tokens keys and values fit into memory; None: unknown.

    The engine counts the states of a row as `Footprint.state_tokens`.

    Args:
        left: Share of the free memory that is reserved for other uses.
    """
    size = cache_footprint(model, tokenizer)
    environment = free_now(model.device)
    if environment.memory is None or size is None:
        return None
    return cache_tokens(environment, size.token, int(left * environment.usable))


def cache_footprint(model: Any, tokenizer: Any) -> Footprint | None:
    """Return the bytes of a model's cache: measured, or estimated for `PlainEngine`.

    None: the config lacks the sizes.
    """
    if why_plain(model, tokenizer) is None:
        return known_footprint(model)
    return estimated_footprint(model.config.get_text_config(), compute_dtype(model))


def why_plain(model: Any, tokenizer: Any) -> str | None:
    """Return in a sentence why a model needs `PlainEngine`; None: it does not.

    Runs the model on a few tokens, once for each dtype.
    """
    if num_virtual(model):
        return "The adapter has virtual tokens, which the engine's cache does not hold."
    config = model.config.get_text_config()
    reasons = _reasons.setdefault(model, {})
    dtype = compute_dtype(model)
    if dtype not in reasons:
        reasons[dtype] = why_plain_class(model) or _by_trying(model, tokenizer, config)
    return reasons[dtype]


def generation_fallbacks(model: Any, tokenizer: Any) -> list[Fallback]:
    """Return why completions of a model are slower than with a recorded `CachedEngine`.

    If memory runs out for the trial of the engine, the one fallback says so.
    """
    try:
        why = why_plain(model, tokenizer)
    except Exception as error:
        if not _ran_out(error):
            raise
        return [
            Fallback(
                path="The engine for completions could not be tried",
                cause=f"Memory ran out for a prompt of {max(LENGTHS)} tokens.",
                cost="The first completions repeat the trial, and fail if memory is still short.",
                fix="Free memory on the device, or load the base with base.quantize: nf4.",
            )
        ]
    if why is None:
        on_gpu = ExecutionPlan.for_model(model).records_decoding
        problem = why_not_recorded(model) if on_gpu else ""
        fallbacks = [unrecorded(problem)] if problem else []
        fallbacks += packed_product.fallbacks()
        return [*fallbacks, *filter(None, (checked.GEMM.fallback,))]
    return [
        Fallback(
            path="Completions are generated batch by batch",
            cause=why,
            cost="A batch ends with its longest completion; later requests wait for the next one.",
            fix="Merge the adapter and serve it with vLLM, or use a method for linear layers."
            if num_virtual(model)
            else "Keep requests of like length together; vLLM serves more architectures.",
        )
    ]


def _ran_out(problem: Exception) -> bool:
    return isinstance(problem, AnswerTooLarge) or is_out_of_memory(problem)


def why_plain_class(model: Any) -> str | None:
    """Return why models of this class and config need `PlainEngine`; None: a trial decides."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "The model is an encoder-decoder."
    if missing := missing_arguments(model, ("position_ids", "cache", "logits_to_keep")):
        return f"{missing}, which the engine needs."
    can = getattr(type(model), "_can_set_attn_implementation", None)
    if not (can and can()):
        return f"{type(model).__name__} does not support other implementations of attention."
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    if {one.get("rope_type") for one in ropes} & {"dynamic", "longrope"}:
        return "Its positions depend on the longest row (rope_type dynamic or longrope)."
    layers = cache_layers(config)
    if not layers:
        return "Its config has no number of layers."
    if len(layers) != config.num_hidden_layers:
        return "Some of its layers share a cache."
    kinds = {type(layer) for layer in layers} - CACHE_LAYERS
    if kinds:
        return f"Its cache has {', '.join(sorted(kind.__name__ for kind in kinds))}."
    return None


def _by_trying(model: Any, tokenizer: Any, config: Any) -> str | None:
    """Return why the likeliest tokens of `CachedEngine` and of the model itself differ, if so."""
    parts = "states and attention" if has_states(config) else "attention"
    sampling = Sampling(max_new_tokens=NEW_TOKENS, top_logprobs=TOP)
    trials: list[tuple[Sequence[int], Limits]] = [(LENGTHS, Limits(prefill=4))]
    if has_states(config):
        trials.append((PADDED_LENGTHS, Limits()))
    for lengths, limits in trials:
        prompts = [
            [(3 + index) * (7 + size) % config.vocab_size for index in range(size)]
            for size in lengths
        ]
        try:
            with CachedEngine(model, tokenizer, limits) as engine:
                engine.ends = frozenset()
                answers = [engine.submit(Request(ids, sampling)) for ids in prompts]
                engine.run()
                engine.footprint()  # measured here, for the memory limit
        except Exception as problem:  # whatever a model raises that cannot use such a cache
            if _ran_out(problem):  # says nothing of the model
                raise
            return (
                f"Its {parts} failed over the engine's cache: {type(problem).__name__}: {problem}"
            )
        if not _have_right_logits(model, prompts, answers):
            return f"Its {parts} computed other logits over the engine's cache."
    return None


def _have_right_logits(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Completion]
) -> bool:
    """Return whether the likeliest tokens of completions have the logits of full forward passes."""
    tops = [torch.tensor([chosen.top for chosen in one.chosen]) for one in answers]  # (T, TOP, 2)

    def full() -> list[Tensor]:
        rows = []
        for ids, completion, top in zip(prompts, answers, tops, strict=True):
            so_far = torch.tensor([[*ids, *completion.ids[:-1]]], device=model.device)
            logits = model(input_ids=so_far, use_cache=False).logits[0, len(ids) - 1 :]
            rows.append(logits.float().log_softmax(-1).cpu().gather(-1, top[..., 0].long()))
        return rows

    with on_device(model.device), evaluating(model):
        return Trial(model, full).accepts([top[..., 1] for top in tops])


def fallbacks_here() -> list[Fallback]:
    """Return what every run or server on this machine computes by a slower path."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).eval()
    fallbacks = generation_fallbacks(model, SimpleNamespace(pad_token_id=0, eos_token_id=1))
    fallbacks += gpu_fallbacks()
    if not torch.cuda.is_available():
        why = no_compiler()
        return [*fallbacks, uncompiled(why)] if why else fallbacks
    pinned_empty([1], torch.uint8)
    return [*fallbacks, *filter(None, (PINNING.fallback, TRITON.missing))]
