"""Attention for training on a CPU: torch's forward, and a backward of matrix products.

torch's flash backward on CPUs takes several times the time of the same products by bmm. The forward
stays torch's flash kernel, whose log-sum-exp makes the softmax again in the backward pass:

    P = exp(s Q K^T + M - lse),  dV = P^T dO,  dP = dO V^T,
    dS = P * (dP - rowsum(dO * O)),  dQ = s dS K,  dK = s dS^T Q     (Dao, 2023, arXiv:2307.08691)

Shapes: B batch, H query heads, K key-value heads (H = G K), L queries, S keys, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_BYTES = 64 << 20
"""Memory that the (L, S) matrices of one chunk of heads may take in float32."""


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Return softmax(s Q K^T + M) V, (B, H, L, D), by torch's own function."""
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Return the same as `reference_attention`, with a faster backward on CPUs.

    Args:
        query: (B, H, L, D). key, value: (B, K, S, D).
        mask: Additive or boolean, broadcast to (B, H, L, S), or None; gets no gradient.
        is_causal: Query i sees keys up to i; then `mask` is None.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    return _Attention.apply(query, key, value, mask, is_causal, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            key.repeat_interleave(groups, 1) if groups > 1 else key,
            value.repeat_interleave(groups, 1) if groups > 1 else value,
            0.0,
            is_causal,
            attn_mask=mask,
            scale=scale,
        )
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        (batch, heads, length, _), (_, kv_heads, keys, _) = query.shape, key.shape
        groups, grad = heads // kv_heads, grads[0]
        delta = (grad * out).sum(-1, dtype=torch.float32)  # (B, H, L)
        rows = [
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
        ]
        # as many (batch, kv head) pairs at once as the (L, S) matrices of all their heads allow
        num_pairs = batch * kv_heads
        step = max(1, CHUNK_BYTES // (4 * groups * length * keys))
        for start in range(0, num_pairs, step):
            part = slice(start, min(start + step, num_pairs))

            def of(tensor: Tensor, count: int, part: slice = part) -> Tensor:
                # (pairs, count * rows, ...): the heads of a pair share its keys, so they are rows
                flat = tensor.reshape(num_pairs, count * tensor.shape[2], *tensor.shape[3:])
                return flat[part]

            q, g = of(query, groups), of(grad, groups)
            k, v = of(key, 1), of(value, 1)
            scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(ctx.scale)  # (n, G L, S)
            bias = _bias(mask, ctx.is_causal, query, kv_heads, keys, part)
            if bias is not None:
                scores.view(-1, groups, length, keys).add_(bias)
            probs = scores.sub_(of(lse, groups)[..., None]).exp_()
            p = probs.to(q.dtype)
            grad_scores = torch.bmm(g, v.transpose(1, 2)).float()
            grad_scores = grad_scores.sub_(of(delta, groups)[..., None]).mul_(probs)
            ds = grad_scores.mul_(ctx.scale).to(q.dtype)
            of(rows[0], groups)[:] = torch.bmm(ds, k)
            of(rows[1], 1)[:] = torch.bmm(ds.transpose(1, 2), q)
            of(rows[2], 1)[:] = torch.bmm(p.transpose(1, 2), g)
        return rows[0], rows[1], rows[2], None, None, None


def _bias(
    mask: Tensor | None, is_causal: bool, query: Tensor, kv_heads: int, keys: int, part: slice
) -> Tensor | None:
    """Return what is added to the scores of some pairs: (n or 1, G or 1, L, S)."""
    batch, heads, length, _ = query.shape
    if is_causal:
        hidden = torch.ones(length, keys, dtype=torch.bool, device=query.device).triu_(1)
        return torch.zeros(1, 1, length, keys, device=query.device).masked_fill_(hidden, -math.inf)
    if mask is None:
        return None
    pairs = torch.arange(part.start, part.stop, device=query.device)
    wide = mask.expand(batch, mask.shape[1], length, keys)
    if wide.shape[1] == 1:
        return wide[pairs // kv_heads]
    return wide.unflatten(1, (kv_heads, heads // kv_heads))[pairs // kv_heads, pairs % kv_heads]
