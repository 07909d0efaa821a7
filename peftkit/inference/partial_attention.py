"""Attention over some of the keys, whose results can be joined, and over parts of the keys.

SDPA with a mask computes each row and head of keys in one thread block: a decoding step of few rows
uses few of a GPU's multiprocessors. There, long keys are split into parts (`num_parts`).

Shapes: B rows, H heads of queries, K of keys, G = H / K, T tokens, L keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels import fused
from peftkit.kernels.device import is_before_ampere, num_processors

SHORTEST_SPLIT, SHORTEST_SPLIT_BY_TORCH = 1024, 4096
"""Minimum keys to split. Triton needs a second kernel and torch fourteen more, at about 2
microseconds each; SDPA needs about 20 for each 1,024 keys of a head. Not measured on a GPU."""
SHORTEST_PART, MOST_PARTS = 256, 64


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


def num_parts(device: torch.device, num_blocks: int, length: int) -> int:
    """Return the number of parts into which keys of some length are split, a power of two.

    Two thread blocks for each multiprocessor hide the latency of memory. 0: Triton's kernel does
    not serve this device (CPUs, MPS; before Ampere it would spill its registers).

    Args:
        num_blocks: Rows times heads of keys.
    """
    if device.type != "cuda" or is_before_ampere(device):
        return 0
    if length < SHORTEST_SPLIT:
        return 1
    most = min(2 * num_processors(device) // num_blocks, length // SHORTEST_PART, MOST_PARTS)
    return 1 << max(most.bit_length() - 1, 0)


class Keys(NamedTuple):
    """Few queries (b, K, M, D), and the keys and values (b, K, L, D) that they attend to.

    Attributes:
        mask: Additive, 0 or the lowest number of its dtype; None: all keys are seen.
        parts: See `num_parts`.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    scores: Scores
    parts: int = 0

    def by_triton(self, whole: bool, expected: Callable[[Keys], Any]) -> Any:
        """Return the result of `triton_attention.split_attention`; None: torch has to compute."""
        if not self.parts:
            return None
        scores, sizes = self.scores, f"({self.q.shape[-1]}, {self.values.shape[-1]})"
        sinks = scores.sinks if whole else None
        numbers = scores.scale, scores.softcap, sinks, self.parts, whole, sizes
        right = partial(expected, self._replace(parts=0))
        return fused.TRITON.launch("split_attention", *self[:4], *numbers, expected=right)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores, parts: int
) -> Tensor:
    """Return the attention (b, K, M, D) of few queries over all keys; see `Keys`."""
    over = Keys(q, keys, values, mask, scores, parts)
    if parts > 1 or not scores.are_plain:
        out: Tensor | None = over.by_triton(True, _decoded)
        if out is not None:
            return out
    return _decoded(over)


def _decoded(over: Keys) -> Tensor:
    q, keys, values, mask, scores, parts = over
    length = keys.shape[2]
    is_split = parts > 1 and length >= SHORTEST_SPLIT_BY_TORCH and length % parts == 0
    if scores.are_plain and not is_split:
        return functional.scaled_dot_product_attention(q, keys, values, mask, scale=scores.scale)
    return _partial(over).normalised(scores.sinks).to(q.dtype)


def partial_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores, parts: int = 0
) -> PartialAttention:
    """Attend to some of the keys; see `Keys`."""
    over = Keys(q, keys, values, mask, scores, parts)
    found = over.by_triton(False, _partial)
    return _partial(over) if found is None else PartialAttention(*found)


def _partial(over: Keys) -> PartialAttention:
    q, keys, values, mask, scores, parts = over
    products = torch.matmul(q, keys.transpose(2, 3)).float() * scores.scale
    if scores.softcap is not None:
        products = (products / scores.softcap).tanh() * scores.softcap
    if mask is not None:
        products = products + mask
    top = products.amax(-1, keepdim=True)
    weights = (products - top).exp()
    out = _weighted_sum(weights.to(values.dtype), values, parts)
    return PartialAttention(out, top, weights.sum(-1, keepdim=True))


def _weighted_sum(weights: Tensor, values: Tensor, parts: int) -> Tensor:
    """Return the product of weights (b, K, M, L) and values (b, K, L, D), in float32."""
    if parts < 2 or values.shape[2] % parts:
        return torch.matmul(weights, values).float()
    weights, values = weights.unflatten(-1, (parts, -1)), values.unflatten(2, (parts, -1))
    return torch.matmul(weights.transpose(2, 3), values).float().sum(2)


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
    part = PartialAttention(*(t.reshape(1, heads * group, length, -1) for t in part))
    sinks = None if scores.sinks is None else scores.sinks.view(-1, 1).expand(-1, length)
    return part.normalised(sinks).to(q.dtype)
