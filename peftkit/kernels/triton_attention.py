"""Attention of few queries over many keys in Triton: the keys are split over the multiprocessors.

A program computes one part of the keys of one slot and head of keys, for all queries that share
them; a second kernel joins the parts by their largest scores and sums (Flash-Decoding, Dao et al.,
2023). Only keys that some query sees are read.

Shapes: S slots, K heads of keys, M queries of a slot and head, L keys, D and E sizes of keys and
values, P parts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-1e30)
"""The largest score of a part without a visible key; finite, since the difference of two is 0."""


@triton.jit
def parts_kernel(
    q,
    keys,
    values,
    mask,
    out,
    top,
    total,
    heads,
    queries,
    length,
    parts,
    scale,
    softcap,
    k_slot,
    k_head,
    v_slot,
    v_head,
    m_slot,
    m_query,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    # one axis of the grid: the others are limited to 65,535 programs
    part, rest = tl.program_id(0) % parts, tl.program_id(0) // parts
    tiles = tl.cdiv(queries, QUERIES)
    tile, of_head = rest % tiles, (rest // tiles).to(tl.int64)
    slot, head = of_head // heads, of_head % heads
    query = tile * QUERIES + tl.arange(0, QUERIES)
    place, value_place = tl.arange(0, PADDED), tl.arange(0, PADDED_VALUES)
    is_query = query < queries
    index = of_head * queries + query
    inside = is_query[:, None] & (place < SIZE)[None, :]
    x = tl.load(q + index[:, None] * SIZE + place[None, :], inside, 0.0)
    key = keys + slot * k_slot + head * k_head + place[None, :]
    value = values + slot * v_slot + head * v_head + value_place[None, :]
    bias = mask + slot * m_slot + query.to(tl.int64)[:, None] * m_query
    peak = tl.full((QUERIES,), LOWEST, tl.float32)
    weight_sum = tl.zeros((QUERIES,), tl.float32)
    value_sum = tl.zeros((QUERIES, PADDED_VALUES), tl.float32)
    size = tl.cdiv(tl.cdiv(length, parts), TOKENS) * TOKENS
    end = tl.minimum((part + 1) * size, length)
    for begin in range(part * size, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        is_read = token < end
        seen = is_query[:, None] & is_read[None, :]
        if MASKED:
            seen = tl.load(bias + token[None, :], seen, -1.0) >= 0
            is_read = tl.max(seen.to(tl.int32), 0) > 0
        at = token.to(tl.int64)[:, None]
        k = tl.load(key + at * SIZE, is_read[:, None] & (place < SIZE)[None, :], 0.0)
        score = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            score = softcap - 2 * softcap / (tl.exp(2 / softcap * score) + 1)  # tanh
        score = tl.where(seen, score, LOWEST)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.where(seen, tl.exp(score - higher[:, None]), 0.0)
        shrink = tl.exp(peak - higher)
        is_value = is_read[:, None] & (value_place < VALUES)[None, :]
        v = tl.load(value + at * VALUES, is_value, 0.0)
        products = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        value_sum = value_sum * shrink[:, None] + products
        weight_sum = weight_sum * shrink + tl.sum(weight, 1)
        peak = higher
    index = index * parts + part
    inside = is_query[:, None] & (value_place < VALUES)[None, :]
    tl.store(out + index[:, None] * VALUES + value_place[None, :], value_sum, inside)
    tl.store(top + index, peak, is_query)
    tl.store(total + index, weight_sum, is_query)


@triton.jit
def join_kernel(
    out,
    top,
    total,
    sinks,
    joined,
    joined_top,
    joined_total,
    parts,
    num_sinks,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    WHOLE: tl.constexpr,
    SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part, place = tl.arange(0, PARTS), tl.arange(0, PADDED_VALUES)
    is_part = part < parts
    tops = tl.load(top + row * parts + part, is_part, LOWEST)
    peak = tl.max(tops, 0)
    weight = tl.exp(tops - peak)
    sums = tl.sum(tl.load(total + row * parts + part, is_part, 0.0) * weight, 0)
    inside = is_part[:, None] & (place < VALUES)[None, :]
    at = (row * parts + part)[:, None] * VALUES + place[None, :]
    value = tl.sum(tl.load(out + at, inside, 0.0) * weight[:, None], 0)
    if WHOLE:
        if SINKS:
            sink = tl.load(sinks + row % num_sinks).to(tl.float32)
            higher = tl.maximum(peak, sink)
            value *= tl.exp(peak - higher)
            sums = sums * tl.exp(peak - higher) + tl.exp(sink - higher)
        value = value / sums
    else:
        tl.store(joined_top + row, peak)
        tl.store(joined_total + row, sums)
    value = value.to(joined.dtype.element_ty)
    tl.store(joined + row * VALUES + place, value, place < VALUES)


def sizes_of(queries: int, size: int, value_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the sizes of `parts_kernel`: tiles of keys and values take 8 KiB each."""
    padded = [max(16, triton.next_power_of_2(n)) for n in (size, value_size)]
    return {
        "SIZE": size,
        "PADDED": padded[0],
        "VALUES": value_size,
        "PADDED_VALUES": padded[1],
        "QUERIES": 16 if queries <= 16 or dtype == torch.float32 else 32,
        "TOKENS": min(max(16, 8192 // dtype.itemsize // max(padded)), 64),
    }


def _with_whole_tokens(x: Tensor) -> Tensor:
    """Return x (S, K, L, n), copied unless the tokens of a head follow each other."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def split_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    parts: int,
    whole: bool,
    _: str,
) -> Any:
    """Return attention over keys in parts: q (S, K, M, D), keys (S, K, L, D), values (S, K, L, E).

    Args:
        mask: Additive, broadcast to (S, 1, M, L); keys with negative values are not seen.
        sinks: One score (K * M,) without a value per query; with `whole` only.
        whole: Whether to return the weighted mean (S, K, M, E) in the dtype of q. Otherwise the
            weighted sum, the largest score and the sum of exponentials (S, K, M, 1), in float32.
        _: Names the sizes for which the kernels are compiled.
    """
    slots, heads, queries, size = q.shape
    length, value_size = values.shape[2:]
    q, rows = q.contiguous(), slots * heads * queries
    keys, values = (_with_whole_tokens(x) for x in (keys, values))
    sizes = sizes_of(queries, size, value_size, q.dtype)
    out = q.new_empty(rows, parts, value_size, dtype=torch.float32)
    top, total = out.new_empty(2, rows, parts)
    bias = q[:, :1, :, :1] if mask is None else mask.expand(slots, 1, queries, length)
    assert mask is None or bias.stride(3) == 1
    tiles = triton.cdiv(queries, sizes["QUERIES"])
    parts_kernel[slots * heads * tiles * parts,](
        q,
        keys,
        values,
        bias,
        out,
        top,
        total,
        heads,
        queries,
        length,
        parts,
        float(scale),
        float(softcap or 1),
        *keys.stride()[:2],
        *values.stride()[:2],
        bias.stride(0),
        bias.stride(2),
        MASKED=mask is not None,
        CAPPED=softcap is not None,
        **sizes,
        num_stages=2,
    )
    joined = q.new_empty(rows, value_size, dtype=q.dtype if whole else torch.float32)
    joined_top, joined_total = out.new_empty(2, rows)
    join_kernel[rows,](
        out,
        top,
        total,
        top if sinks is None else sinks,
        joined,
        joined_top,
        joined_total,
        parts,
        heads * queries,
        PARTS=triton.next_power_of_2(parts),
        VALUES=value_size,
        PADDED_VALUES=sizes["PADDED_VALUES"],
        WHOLE=whole,
        SINKS=sinks is not None,
    )
    shape = slots, heads, queries
    if whole:
        return joined.view(*shape, value_size)
    return joined.view(*shape, value_size), joined_top.view(*shape, 1), joined_total.view(*shape, 1)
