"""Attention for training on a CPU in 16 bits, where plain products beat torch's flash backward.

It computes softmax(s Q K^T + M) V with plain products. The query heads of a group are rows of one
product with their shared keys, which are not repeated. In bfloat16 the scores are rounded before
the softmax, as in transformers' eager attention; the softmax is computed in float32. The
probabilities are saved for the backward pass, which suits short rows only.

Shapes: B batch, H query heads, K key-value heads (H = G K), L queries, S keys, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

MAX_BYTES = 24 << 20
"""Maximum bytes for the probabilities of a layer; torch handles longer rows."""


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Return softmax(s Q K^T + M) V, (B, H, L, D), by torch's function."""
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `reference_attention`, with optional position bias, softcap and sinks.

    Args:
        query: (B, H, L, D). key, value: (B, K, S, D).
        mask: Additive or boolean (True: attend), (B or 1, 1 or H, L, S), or None.
        is_causal: Query i attends to keys up to i; `mask` must be None.
        position_bias: Bias added to the scores, of the mask's shape (T5).
        softcap: Scores before mask and bias become cap * tanh(scores / cap) (Gemma 2).
        sinks: (H,) score of a further key of each head, whose value is zero (gpt-oss).
    """
    (batch, heads, length, size), (_, kv_heads, keys, _) = query.shape, key.shape
    pairs = batch * kv_heads
    rows = (query * scale).reshape(pairs, heads // kv_heads * length, size)
    scores = torch.bmm(rows, key.reshape(pairs, keys, size).transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    # not a view: autograd would copy the gradient of a view that changes in place
    scores = torch.ops.aten._unsafe_view(scores, (batch, heads, length, keys))
    hidden = None if mask is None else _additive(mask, query.dtype)
    if is_causal:
        hidden = torch.full((length, keys), -math.inf, dtype=query.dtype, device=query.device)
        hidden = hidden.triu_(1)
    for term in (position_bias, hidden):
        if term is not None:
            scores.add_(term.contiguous())  # T5 stores heads last: six times slower
    if sinks is None:
        probs = functional.softmax(scores, dim=-1)
    else:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, length, 1)
        probs = functional.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :keys]
    probs = probs.reshape(pairs, rows.shape[1], keys)
    out = torch.bmm(probs, value.reshape(pairs, keys, value.shape[-1]))
    return out.reshape(batch, heads, length, value.shape[-1])


def is_short(query: Tensor, key: Tensor) -> bool:
    """Return whether the probabilities are small enough to be saved."""
    batch, heads, length, _ = query.shape
    return batch * heads * length * key.shape[2] * query.element_size() <= MAX_BYTES


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive form of a mask for scores of this dtype."""
    if mask.dtype == dtype:
        return mask
    # finite: within a window a row of padding may attend to nothing
    lowest = torch.finfo(dtype).min
    if mask.dtype != torch.bool:
        return mask.clamp(min=lowest).to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, lowest)
