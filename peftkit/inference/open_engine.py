"""The engine of a model: `CachedEngine`, or `PlainEngine` over `model.generate`.

`PlainEngine` serves models whose cache cannot be split by rows: states or convolutions,
encoder-decoders, virtual tokens, custom positions, and prompts with media. It runs a batch until
its last row has ended; later requests wait for the next batch. Each row still has separate
settings, seed, adapter and end tokens.

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
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from peftkit.data.pack import padded_rows
from peftkit.events import Fallback
from peftkit.execution.environment import Environment, free_now
from peftkit.execution.plan import ExecutionPlan, compute_dtype
from peftkit.forward.compat import missing_arguments
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
from peftkit.inference.ready import on_device
from peftkit.inference.recorder import unrecorded, why_not_recorded
from peftkit.inference.sampling import Sampling
from peftkit.kernels import checked
from peftkit.model.blocks import is_sharded
from peftkit.model.modes import evaluating
from peftkit.model.places import num_virtual

CACHE_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""Share of the free memory for keys and values. Prompts and sampling need the rest, and on a CPU
also unpacked weights (`ready.COPY_SHARE`)."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_16_BIT = 0.1
"""Difference of logits, as a share of their standard deviation; a wrong mask makes it about 1."""
LENGTHS = (9, 6)
"""Of the prompts that a model is tried with."""
TOP = 16
"""Likeliest tokens that are compared."""

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
        limits = replace(limits, tokens=tokens_that_fit(model))
    kind = CachedEngine if why_plain(model, tokenizer) is None else PlainEngine
    return kind(model, tokenizer, limits, use, on_fewer)


def tokens_that_fit(model: Any, *, left: float = 0.0) -> int | None:
    """Return for how many tokens keys and values fit into memory; None: unknown.

    Args:
        left: Share of the free memory that is reserved for other uses.
    """
    environment = free_now(model.device)
    size = bytes_per_token(model.config.get_text_config(), compute_dtype(model))
    if environment.memory is None or size is None:
        return None
    return cache_tokens(environment, size, int(left * environment.usable))


def cache_tokens(environment: Environment, size: int, taken: int = 0) -> int:
    """Return for how many tokens keys and values fit.

    Args:
        size: Bytes of a token.
        taken: Bytes of the free memory that are reserved for other uses.
    """
    share = CACHE_SHARE["cuda" if environment.on_gpu else "cpu"]
    return int(share * max(environment.usable - taken, 0)) // size


def bytes_per_token(config: Any, dtype: torch.dtype) -> int | None:
    """Return the bytes of a token's keys and values; None: the config lacks the sizes.

    One layer is counted twice, since its copy exists while the cache grows.
    """
    query_heads = getattr(config, "num_attention_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    if not (isinstance(heads, int) and isinstance(query_heads, int)):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return int(2 * (config.num_hidden_layers + 1) * heads * size * dtype.itemsize)


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
        reasons[dtype] = _by_its_class(model, config) or _by_trying(model, tokenizer, config)
    return reasons[dtype]


def generation_fallbacks(model: Any, tokenizer: Any) -> list[Fallback]:
    """Return why completions of a model are slower than those of a recorded `CachedEngine`."""
    why = why_plain(model, tokenizer)
    if why is None:
        on_gpu = ExecutionPlan.for_model(model).records_decoding
        problem = why_not_recorded(model) if on_gpu else ""
        fallbacks = [unrecorded(problem)] if problem else []
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


def _by_its_class(model: Any, config: Any) -> str | None:
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
    layers = DynamicCache(config=config).layers
    if len(layers) != config.num_hidden_layers:
        return "Some of its layers share a cache."
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        return f"Its cache has {', '.join(sorted(kind.__name__ for kind in kinds))}."
    return None


def _by_trying(model: Any, tokenizer: Any, config: Any) -> str | None:
    """Return why the likeliest tokens of `CachedEngine` and of the model itself differ, if so."""
    prompts = [
        [(3 + index) * (7 + size) % config.vocab_size for index in range(size)] for size in LENGTHS
    ]
    sampling = Sampling(max_new_tokens=2, top_logprobs=TOP)
    tolerance = TOLERANCE.get(compute_dtype(model), TOLERANCE_16_BIT)
    try:
        with CachedEngine(model, tokenizer, Limits(prefill=4)) as engine:
            engine.ends = frozenset()
            answers = [engine.submit(Request(ids, sampling)) for ids in prompts]
            engine.run()
    except AnswerTooLarge:  # says nothing of the model
        raise
    except Exception as problem:  # whatever a model raises that cannot use such a cache
        return f"Its attention fails over the engine's cache: {type(problem).__name__}: {problem}"
    for ids, completion in zip(prompts, answers, strict=True):
        for number, chosen in enumerate(completion.chosen):
            with on_device(model.device), evaluating(model):
                so_far = torch.tensor([[*ids, *completion.ids[:number]]], device=model.device)
                logits = model(input_ids=so_far, use_cache=False).logits[0, -1].float()
            expected = logits.log_softmax(-1).tolist()
            error = max(abs(expected[token] - log_prob) for token, log_prob in chosen.top)
            if not error <= tolerance * float(logits.std()):
                return "Its attention computes other logits over the engine's cache."
    return None


class PlainEngine(Engine):
    """An engine whose step answers a batch to its end, by `model.generate`."""

    _batch: Sequence[Completion] = ()
    _begun: Sequence[Completion] = ()

    def _prepare(self, stack: ExitStack) -> None:
        stack.callback(setattr, self.model, "generation_config", self.model.generation_config)
        # Empty: transformers fills in from the model's own what a config does not set.
        self.model.generation_config = GenerationConfig()

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
            number += 1
        return number

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
