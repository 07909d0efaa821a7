"""Attention for training on a CPU, where torch's flash backward is slower than plain products.

Softmax(s Q K^T + M) V written out, the query heads of a group as rows of one product with the keys
they share, so that nothing is repeated. In bfloat16 the scores are rounded before the softmax, as
in transformers' own eager attention; the softmax itself is computed in float32.

Of short rows the probabilities are kept for the backward pass. Long rows go some queries at a time,
each with the keys up to the last that one of them sees, which is half of them where attention is
causal; the backward pass computes their probabilities again.

Shapes: B batch, H query heads, K key-value heads (H = G K), L queries, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MAX_BYTES = 4 << 20
"""Probabilities of one layer may take this much; those of longer rows are computed twice."""

MAX_BIASED_BYTES = 16 << 20
"""As much where there is a bias of positions: longer rows are left to torch, which is slower."""

MIN_QUERIES, MAX_PARTS = 128, 16
"""A long row goes so many queries at a time, or more where there were more parts of it."""


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Return softmax(s Q K^T + M) V, (B, H, L, D), by torch's own function."""
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the same as `reference_attention`, of which two things more can be asked.

    Args:
        query: (B, H, L, D). key, value: (B, K, S, D).
        mask: Additive or boolean (True: seen), (B or 1, 1 or H, L, S), or None.
        is_causal: Query i sees keys up to i; then `mask` is None.
        position_bias: Added to the scores too, of the mask's shape (T5).
        softcap: Scores before mask and bias become cap * tanh(scores / cap) (Gemma 2).
    """
    (batch, heads, length, size), (_, kv_heads, keys, _) = query.shape, key.shape
    pairs = batch * kv_heads
    hidden = None if mask is None else additive(mask, query.dtype)
    if is_causal:
        hidden = _causal(0, length, keys, query)
    terms = (position_bias, hidden)
    _, probs = _probabilities(query, key.reshape(pairs, keys, size), terms, scale, softcap)
    out = torch.bmm(probs, value.reshape(pairs, keys, value.shape[-1]))
    return out.view(batch, heads, length, value.shape[-1])


def is_short(query: Tensor, key: Tensor, *, biased: bool) -> bool:
    """Tell whether the probabilities of these are few enough to be kept."""
    batch, heads, length, _ = query.shape
    needed = batch * heads * length * key.shape[2] * query.element_size()
    return needed <= (MAX_BIASED_BYTES if biased else MAX_BYTES)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as what is added to scores of this dtype; it may be that already."""
    if mask.dtype == dtype:
        return mask
    # not infinite: a row of padding may see nothing at all, within a window
    least = torch.finfo(dtype).min
    if mask.dtype != torch.bool:
        return mask.clamp(min=least).to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, least)


@torch.library.custom_op("peftkit::blocked_attention", mutates_args=())
def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Return the same as `reference_attention` and keep nothing but its inputs."""
    out = _like_attention(query, key, value)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)  # (B K, S, D)
    for part, seen, hidden in _parts(query, key, mask, is_causal):
        _, probs = _probabilities(query[:, :, part], keys[:, seen], (hidden,), scale)
        out[:, :, part] = torch.bmm(probs, values[:, seen]).view(out[:, :, part].shape)
    return out


@torch.library.custom_op("peftkit::blocked_attention_backward", mutates_args=())
def blocked_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the result."""
    grad_query = torch.empty_like(query)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    # summed over all parts: in float32
    grad_keys, grad_values = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
    for part, seen, hidden in _parts(query, key, mask, is_causal):
        rows, probs = _probabilities(query[:, :, part], keys[:, seen], (hidden,), scale)
        grad_out = grad[:, :, part].reshape(*rows.shape[:2], -1)
        grad_values[:, seen] += torch.bmm(probs.transpose(1, 2), grad_out)
        grad_probs = torch.bmm(grad_out, values[:, seen].transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        grad_rows = torch.bmm(grad_scores, keys[:, seen]) * scale
        grad_query[:, :, part] = grad_rows.view(grad_query[:, :, part].shape)
        grad_keys[:, seen] += torch.bmm(grad_scores.transpose(1, 2), rows)
    return (
        grad_query,
        grad_keys.view(key.shape).to(key.dtype),
        grad_values.view(value.shape).to(value.dtype),
    )


def _parts(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield some queries, the keys that any of them sees, and what is added to their scores."""
    length, keys = query.shape[2], key.shape[2]
    if mask is not None:
        mask = mask.expand(-1, -1, length, keys)
    at_once = max(MIN_QUERIES, -(-length // MAX_PARTS))
    for start in range(0, length, at_once):
        part = slice(start, min(start + at_once, length))
        if is_causal:
            seen = slice(0, min(part.stop, keys))
            hidden = _causal(part.start, part.stop, seen.stop, query)
        elif mask is None:
            seen, hidden = slice(0, keys), None
        else:
            seen = slice(0, keys)
            columns = _seen(mask[..., part, :]).flatten(0, -2).any(0).nonzero()
            if len(columns):
                seen = slice(int(columns[0]), int(columns[-1]) + 1)
            hidden = additive(mask[..., part, seen], query.dtype)
        yield part, seen, hidden


def _probabilities(
    query: Tensor,
    keys: Tensor,
    terms: Sequence[Tensor | None],
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the rows of products that n queries (B, H, n, D) are, and their probabilities.

    Args:
        keys: (B K, S, D).
        terms: What is added to the scores, each broadcast to (B, H, n, S).

    Returns:
        (B K, G n, D) and (B K, G n, S).
    """
    batch, heads, length, size = query.shape
    scaled = query if scale == 1 else query * scale
    rows = scaled.reshape(len(keys), heads * batch // len(keys) * length, size)
    scores = torch.bmm(rows, keys.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    # no view, as autograd sees it: of a view that changes it would copy the gradient
    scores = torch.ops.aten._unsafe_view(scores, (batch, heads, length, keys.shape[1]))
    for term in terms:
        if term is not None:
            scores.add_(term.contiguous())  # heads last, as T5 has them: six times the time
    probs = functional.softmax(scores, dim=-1)
    return rows, probs.view(len(keys), rows.shape[1], keys.shape[1])


@blocked_attention.register_fake
def _like_attention(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@blocked_attention_backward.register_fake
def _like_gradients(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = blocked_attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return (*found, None, None, None)


blocked_attention.register_autograd(_gradients, setup_context=_save)


def _causal(start: int, stop: int, keys: int, like: Tensor) -> Tensor:
    """Return what hides from queries start ... stop the keys after each: (stop - start, keys)."""
    hidden = torch.full((stop - start, keys), -math.inf, dtype=like.dtype, device=like.device)
    return hidden.triu_(1 + start)


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
