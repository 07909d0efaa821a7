"""Our attention is torch's own, forward and backward, at odd shapes and with any mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peftkit.kernels import attention
from peftkit.kernels.attention import (
    blocked_attention,
    blocked_attention_backward,
    grouped_attention,
    reference_attention,
)
from peftkit.kernels.grid import collected, grid_of, spread

SHAPES = [(1, 1, 1, 1, 8), (2, 4, 2, 9, 16), (3, 6, 2, 41, 8), (2, 9, 3, 33, 64), (1, 5, 1, 17, 24)]
"""Batch, heads, kv heads, length, head size."""


def masks(kind: str, batch: int, length: int) -> tuple[Tensor | None, bool]:
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if kind == "causal":
        return None, True
    if kind == "full":
        return None, False
    # two documents a row, each isolated; another cut in each row
    cut = torch.arange(batch).add(length // 2).clamp(max=max(length - 1, 0))
    document = torch.arange(length)[None] >= cut[:, None]
    isolated = seen & (document[:, :, None] == document[:, None, :])
    if kind == "bool":
        return isolated[:, None], False
    return torch.zeros(isolated.shape).masked_fill(~isolated, -torch.inf)[:, None], False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["grouped", "biased", "blocked", "blocked: few parts"])
@pytest.mark.parametrize("kind", ["causal", "full", "bool", "float"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_torchs_own(
    shape: tuple[int, ...],
    kind: str,
    way: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "MIN_QUERIES", 7)
    monkeypatch.setattr(attention, "MAX_PARTS", 2 if way == "blocked: few parts" else 16)
    biased = way == "biased"
    batch, heads, kv_heads, length, size = shape
    mask, is_causal = masks(kind, batch, length)
    sizes = ((heads, length), (kv_heads, length), (kv_heads, length))
    # as models make them: (B, L, H, D) transposed
    inputs = [
        torch.randn(batch, n, h, size).to(dtype).transpose(1, 2).requires_grad_() for h, n in sizes
    ]
    wide = [t.detach().float().requires_grad_() for t in inputs]
    wide_mask = mask.float() if mask is not None and mask.dtype != torch.bool else mask
    bias = torch.randn(1, heads, length, length).to(dtype) if biased else None
    all_hidden = wide_mask
    if bias is not None:  # torch knows one mask only
        seen = masks("bool", batch, length)[0] if mask is not None else None
        seen = torch.ones(length, length, dtype=torch.bool).tril() if is_causal else seen
        all_hidden = bias.float() if seen is None else bias.float().where(seen, -torch.inf)
    causal = is_causal and bias is None
    expected = reference_attention(*wide, all_hidden, causal, size**-0.5)
    if way.startswith("blocked"):
        found = blocked_attention(*inputs, mask, is_causal, size**-0.5)
    else:
        found = grouped_attention(*inputs, mask, is_causal, size**-0.5, bias)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, wide, direction)
    grads = torch.autograd.grad(found, inputs, direction.to(dtype))
    # bfloat16 has 8 bits: sums of up to 41 terms of order one
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a.float(), b, atol=tolerance, rtol=tolerance)


def test_capped_scores_are_those_of_the_formula() -> None:
    inputs = [torch.randn(2, n, 9, 8, requires_grad=True) for n in (4, 2, 2)]
    query, key, value = inputs
    scores = query @ key.repeat_interleave(2, dim=1).mT / 8**0.5
    capped = 0.7 * torch.tanh(scores / 0.7)
    hidden = torch.full((9, 9), -torch.inf).triu(1)
    expected = (capped + hidden).softmax(-1) @ value.repeat_interleave(2, dim=1)
    found = grouped_attention(query, key, value, None, True, 8**-0.5, softcap=0.7)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, direction)
    for a, b in zip(torch.autograd.grad(found, inputs, direction), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("keys", [3, 40])
def test_keys_of_another_row_may_be_fewer_or_more(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MIN_QUERIES", 7)
    sizes = ((4, 17, 8), (2, keys, 8), (2, keys, 6))  # values may have a size of their own
    inputs = [torch.randn(2, *size, requires_grad=True) for size in sizes]
    mask = torch.arange(keys) < torch.tensor([[keys], [2]])[:, None, None]
    expected = reference_attention(*inputs, mask, False, 0.3)
    found = blocked_attention(*inputs, mask, False, 0.3)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, direction)
    for a, b in zip(torch.autograd.grad(found, inputs, direction), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_of_a_window_only_its_keys_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_QUERIES", 8)
    distance = torch.arange(64)[:, None] - torch.arange(64)
    query = torch.randn(1, 2, 64, 8)
    within = (distance >= 0) & (distance < 5)
    touched = [seen for _, seen, _ in attention._parts(query, query, within[None, None], False)]
    assert touched == [slice(max(start - 4, 0), start + 8) for start in range(0, 64, 8)]


def test_operators_keep_what_torch_asks_of_them() -> None:
    query, key, value = (torch.randn(1, n, 9, 8, requires_grad=True) for n in (4, 2, 2))
    torch.library.opcheck(blocked_attention, (query, key, value, None, True, 0.3))
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    torch.library.opcheck(blocked_attention, (query, key, value, mask, False, 0.3))
    plain = [x.detach() for x in (torch.randn(1, 4, 9, 8), query, key, value)]
    torch.library.opcheck(blocked_attention_backward, (*plain, None, True, 0.3))
    grid = grid_of([[0, 1, 2, 3], [0, 1, 4]], (2, 4))
    torch.library.opcheck(spread, (torch.randn(2, 4, 3, 5), grid.tokens))
    inside = torch.randn(len(grid.tokens), 3, grid.tokens.shape[1], 5)
    torch.library.opcheck(collected, (inside, grid.places, grid.shared, grid.copies))
    torch.library.opcheck(collected, (inside, grid.places, None, None))
