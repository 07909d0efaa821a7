"""Attention for training on a CPU, where torch's flash backward is slower than plain products.

Softmax(s Q K^T + M) V written out, the query heads of a group as rows of one product with the keys
they share, so that nothing is repeated. It keeps the probabilities for the backward pass, which is
why it is for short rows alone. In bfloat16 the scores are rounded before the softmax, as in
transformers' own eager attention; the softmax itself is computed in float32.

Shapes: B batch, H query heads, K key-value heads (H = G K), L queries, S keys, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

MAX_BYTES = 16 << 20
"""Probabilities of one layer may take this much; longer rows are better left to torch."""


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
    pairs, groups = batch * kv_heads, heads // kv_heads
    rows = (query * scale).reshape(pairs, groups * length, size)
    scores = torch.bmm(rows, key.reshape(pairs, keys, size).transpose(1, 2))  # (B K, G L, S)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(batch, heads, length, keys)
    hidden = _causal(length, keys, query) if is_causal else _additive(mask, query.dtype)
    for term in (position_bias, hidden):
        if term is not None:  # not in place: of a view that changes, autograd copies the gradient
            scores = scores + term.contiguous()  # heads last, as T5 has them: six times the time
    probs = functional.softmax(scores, dim=-1).view(pairs, groups * length, keys)
    out = torch.bmm(probs, value.reshape(pairs, keys, value.shape[-1]))
    return out.view(batch, heads, length, value.shape[-1])


def is_short(query: Tensor, key: Tensor) -> bool:
    """Tell whether the probabilities of these fit into MAX_BYTES."""
    batch, heads, length, _ = query.shape
    return batch * heads * length * key.shape[2] * query.element_size() <= MAX_BYTES


def _causal(length: int, keys: int, like: Tensor) -> Tensor:
    hidden = torch.full((length, keys), -math.inf, dtype=like.dtype, device=like.device)
    return hidden.triu_(1)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    # not infinite: a row of padding may see nothing at all, within a window
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
