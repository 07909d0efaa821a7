"""The engine of a model: `CachedEngine`, or `PlainEngine` over `model.generate`.

`PlainEngine` serves models whose cache cannot be split by rows: encoder-decoders, virtual tokens,
custom cache classes, custom positions, and prompts with media. It runs a batch until its
last row has ended; later requests wait for the next batch. Each row still has separate settings,
seed, adapter and end tokens, and completes its prompt as it does alone: rows are padded only if the
model's numbers do not depend on it (`takes_padding`, `limits_of`).

Shapes: B rows, T tokens of the longest prompt, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from peftkit.data.pack import padded_rows
from peftkit.events import Fallback
from peftkit.execution.environment import Environment, free_now
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.plan import ExecutionPlan, compute_dtype
from peftkit.forward.compat import missing_arguments
from peftkit.forward.noise import Trial
from peftkit.forward.row_lengths import limits_of
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import (
    AnswerTooLarge,
    Completion,
    Engine,
    Limits,
    OnFewer,
    Request,
    Use,
    masked,
    table_of,
)
from peftkit.inference.footprint import Footprint, known_footprint
from peftkit.inference.left_padding import takes_padding
from peftkit.inference.ready import on_device
from peftkit.inference.recorder import unrecorded, why_not_recorded
from peftkit.inference.sampling import Sampling
from peftkit.inference.states import has_states
from peftkit.kernels import checked, packed_product
from peftkit.model.blocks import is_sharded
from peftkit.model.modes import evaluating
from peftkit.model.places import num_virtual

CACHE_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""Share of the free memory for keys and values. Prompts and sampling need the rest, and on a CPU
also unpacked weights (`ready.COPY_SHARE`)."""
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

PLAIN_ROWS = 16
"""Rows of a plain batch, which all run until the last one has ended."""

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
    if not (layers := _cache_layers(config)):
        return []
    configs = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    if len(layers) != len(configs):
        return list(configs)
    pairs = zip(configs, layers, strict=True)
    return [one for one, layer in pairs if isinstance(layer, DynamicLayer)]


def _cache_layers(config: Any) -> list[Any]:
    """Return the layers of transformers' cache; none for a config of several models, as BLT's."""
    return DynamicCache(config=config).layers if hasattr(config, "num_hidden_layers") else []


def _bytes_in_layer(config: Any, dtype: torch.dtype) -> int | None:
    query_heads = getattr(config, "num_attention_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    if not (isinstance(heads, int) and isinstance(query_heads, int)):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return int(2 * heads * size * dtype.itemsize)


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
    layers = _cache_layers(config)
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


class PlainEngine(Engine):
    """An engine whose step answers a batch to its end, by `model.generate`."""

    _batch: Sequence[Completion] = ()
    _begun: Sequence[Completion] = ()

    def _prepare(self, stack: ExitStack) -> None:
        stack.callback(setattr, self.model, "generation_config", self.model.generation_config)
        # Empty: transformers fills in from the model's own what a config does not set.
        self.model.generation_config = GenerationConfig()
        self._limit = limits_of(self.model).batch

    @property
    def num_running(self) -> int:
        return len(self._batch)

    def _running(self) -> list[Completion]:
        return list(self._batch)

    def forget(self, adapter: str) -> None:
        """Nothing is kept from batch to batch."""

    def _take_back(self) -> list[Completion]:
        return [one for one in self._begun if one.ended_by is None]

    def _advance(self) -> None:
        waiting = [one for one in self._waiting if one.ended_by is None]
        texts = list(takewhile(lambda one: one.request.inputs is None, waiting))
        batch = texts[: self._num_rows(texts)] or waiting[:1]
        self._batch = self._begun = batch
        self._waiting = deque(waiting[len(batch) :])
        if not batch:
            return
        inputs = batch[0].request.inputs
        if inputs is None:
            prompts = [one.tokens for one in batch]
            ids, mask = padded_rows(prompts, self._pad or 0, left=True)
            inputs = {"input_ids": ids, "attention_mask": mask}
        try:
            with self._using([one.request.adapter for one in batch]):
                self.answer(batch, inputs)
        finally:
            self._batch = ()

    def _num_rows(self, rows: Sequence[Completion]) -> int:
        """Return how many of the first rows fit into a batch, at least one."""
        most = math.inf if self.limits.tokens is None else self.limits.tokens
        number = longest = 0
        for row in rows[: min(self.limits.rows, PLAIN_ROWS)]:
            longest = max(longest, row.num_tokens)
            if number and (number + 1) * longest > most:
                break
            if not self._can_pad([*rows[:number], row]):
                break
            adapters = [one.request.adapter for one in rows[:number]]
            if not self._can_join(row.request.adapter, adapters):
                break
            number += 1
        return number

    def _can_pad(self, rows: Sequence[Completion]) -> bool:
        """Return whether rows in one batch have the completions that they have alone."""
        lengths = {len(row.tokens) for row in rows}
        if len(lengths) == 1:
            return True
        # a row that has ended grows with the others
        width = max(lengths) + max(row.max_new_tokens - len(row.ids) for row in rows)
        fits = self._limit is None or width <= self._limit
        return fits and takes_padding(self.model, self._pad or 0)

    def answer(self, rows: Sequence[Completion], inputs: Mapping[str, Tensor]) -> None:
        """Run a batch until its last row has ended.

        Args:
            inputs: The model's inputs, padded on the left: input_ids (B, T) and others.
        """
        settings = GenerationConfig(
            do_sample=False,
            use_cache=True,
            max_new_tokens=max(one.max_new_tokens - len(one.ids) for one in rows),
            pad_token_id=self._pad or 0,
        )
        generate = cast(Callable[..., Tensor], self.model.generate)  # its decorators hide its type
        generate(
            **{name: value.to(self.model.device) for name, value in inputs.items()},
            generation_config=settings,
            logits_processor=LogitsProcessorList([_Choose(rows, self.model.device)]),
            stopping_criteria=StoppingCriteriaList([_Ended(rows)]),
        )


class _Choose(LogitsProcessor):
    """Chooses each row's token by its own settings, and makes it the likeliest."""

    def __init__(self, rows: Sequence[Completion], device: torch.device) -> None:
        self._rows = rows
        self._table = table_of(rows, device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self._table.choose(masked(scores, self._rows))
        for row, choice in zip(self._rows, self._table.choices(chosen.tolist()), strict=True):
            row.take(choice)
        only_chosen = torch.full_like(scores, -torch.inf)
        return only_chosen.scatter_(1, chosen[:, :1].to(scores.device, torch.long), 0.0)


class _Ended(StoppingCriteria):
    """Stops the rows that have ended."""

    def __init__(self, rows: Sequence[Completion]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: object) -> Tensor:
        ended = [row.ended_by is not None for row in self._rows]
        return torch.tensor(ended, device=input_ids.device)
