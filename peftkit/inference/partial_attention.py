"""Attention over some of the keys, whose results can be joined.

Shapes: B rows, H heads of queries, K of keys, G = H / K, T tokens, L keys, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Scores(NamedTuple):
    """The scores of a layer: scale, soft cap, and one attention sink (H,) per head."""

    scale: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def are_plain(self) -> bool:
        """Whether torch's SDPA supports them."""
        return self.softcap is None and self.sinks is None


class PartialAttention(NamedTuple):
    """Attention over some of the keys, not divided by the sum of weights; float32.

    Attributes:
        out: (B, K, G, D), the weighted sum of the values.
        top: (B, K, G, 1), the highest score.
        total: (B, K, G, 1), the sum of exp(score - top).
    """

    out: Tensor
    top: Tensor
    total: Tensor

    def add(self, rows: Tensor, other: PartialAttention) -> None:
        """Add the attention of some rows over other keys, in place."""
        before = PartialAttention(*(t[rows] for t in self))
        top = torch.maximum(before.top, other.top)
        scale, other_scale = (before.top - top).exp(), (other.top - top).exp()
        self.out[rows] = before.out * scale + other.out * other_scale
        self.total[rows] = before.total * scale + other.total * other_scale
        self.top[rows] = top

    def normalised(self, sinks: Tensor | None) -> Tensor:
        """Return the weighted mean of the values; sinks (H,) are scores without a value."""
        if sinks is None:
            return self.out / self.total
        sinks = sinks.float().reshape(self.top.shape[1], self.top.shape[2], 1)
        top = torch.maximum(self.top, sinks)
        weight = (self.top - top).exp()
        return self.out * weight / (self.total * weight + (sinks - top).exp())


def partial_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores
) -> PartialAttention:
    """Attend to some of the keys: q (b, K, M, D), keys and values (b, K, L, D)."""
    products = torch.matmul(q, keys.transpose(2, 3)).float() * scores.scale
    if scores.softcap is not None:
        products = (products / scores.softcap).tanh() * scores.softcap
    if mask is not None:
        products = products + mask
    top = products.amax(-1, keepdim=True)
    weights = (products - top).exp()
    out = torch.matmul(weights.to(values.dtype), values).float()
    return PartialAttention(out, top, weights.sum(-1, keepdim=True))


def full_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Attend to all keys: q (1, H, T, D), keys and values (1, K, L, D); without a mask: causal."""
    heads, length = keys.shape[1], q.shape[2]
    grouped = q.view(heads, -1, length, q.shape[-1])  # (K, G, T, D)
    group = grouped.shape[1]
    if scores.are_plain:
        keys, values = (t[0, :, None].expand(-1, group, -1, -1) for t in (keys, values))
        out = functional.scaled_dot_product_attention(
            grouped, keys, values, mask, is_causal=mask is None, scale=scores.scale
        )
        return out.reshape(1, q.shape[1], length, -1)
    assert mask is not None
    flat = grouped.reshape(1, heads, group * length, -1)
    part = partial_attention(flat, keys, values, mask.repeat(group, 1), scores)
    part = PartialAttention(*(t.view(1, heads * group, length, -1) for t in part))
    sinks = None if scores.sinks is None else scores.sinks.view(-1, 1).expand(-1, length)
    return part.normalised(sinks).to(q.dtype)
