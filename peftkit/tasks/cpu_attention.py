"""Lets a model use the CPU attention of kernels/, through transformers' own extension point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from peftkit.kernels.attention import (
    MAX_BYTES,
    additive,
    blocked_attention,
    grouped_attention,
    is_short,
)
from peftkit.kernels.grid import Grid, into_grid, out_of_grid

NAME = "peftkit_grouped"
PLAIN = {
    *("position_ids", "use_cache", "output_router_logits", "output_attentions"),
    "sliding_window",  # which the mask has in it, as for SDPA
}
"""Arguments that do not change what attention computes; others are left to transformers."""


@contextmanager
def cpu_attention(model: Any) -> Iterator[bool]:
    """Train with our own attention where that is exact and faster; say whether it is in use.

    It is where the model is on a CPU and dispatches its attention to torch's SDPA. Each call that
    asks for more than it knows (sinks, dropout, a bias on long rows) goes to SDPA as before. A
    model that caps its scores, which SDPA cannot, takes it in place of its eager attention.
    """
    if not _applies(model):
        yield False
        return
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield True
    finally:
        set_document_layout()
        model.set_attn_implementation(before)


_grids: tuple[Grid, ...] = ()


def set_document_layout(*grids: Grid) -> None:
    """Say how the documents of the next forward pass, and its backward pass, lie in rows.

    It is no context: blocks that are recomputed ask again in the backward pass.

    Args:
        grids: None: each row is a document. Two: an encoder's and a decoder's, whose rows are not
            of one length.
    """
    global _grids
    _grids = grids


def _grid_with(length: int) -> Grid:
    """Return the grid whose tokens are in rows of this length."""
    first, *others = _grids
    return next((grid for grid in others if grid.places.shape[1] == length), first)


def _mask(*, dtype: torch.dtype = torch.float32, **asked: Any) -> Tensor | None:
    """Return what attention may see, as transformers' own function does; in a grid, of the grid.

    Made additive once for all layers, unless large: they would take twice as long to read it.
    """
    seen = _seen_in_grid(**asked) if _grids else sdpa_mask(**asked)
    if seen is None or seen.numel() * dtype.itemsize > MAX_BYTES:
        return seen
    # under autocast scores are of another dtype
    return seen if torch.is_autocast_enabled(seen.device.type) else additive(seen, dtype)


def _seen_in_grid(
    *, mask_function: Callable[..., Tensor], attention_mask: Tensor | None, **more: Any
) -> Tensor:
    """Return what attention may see (R, 1, T, T).

    The model's function of any two tokens is asked for those of the longest document, which has
    the first ones of the first row and stands there as it would alone.
    """
    queries, keys = _grid_with(more["q_length"]), _grid_with(more["kv_length"])
    if attention_mask is not None or more.get("use_vmap"):
        raise RuntimeError("documents in one row have no mask but their own")
    if (more["batch_size"], more["q_length"]) != queries.places.shape:
        raise RuntimeError("these are other rows than set_document_layout was told")
    row, column = queries.tokens.amin(0)[:, None], keys.tokens.amin(0)
    real = (keys.tokens < keys.places.numel() - 1)[:, None, None]
    seen = (mask_function(0, 0, row, column) & real).expand(-1, -1, len(row), -1)
    if queries is not keys:
        return seen
    return seen | torch.eye(len(row), dtype=torch.bool)  # padding has to see something


def _applies(model: Any) -> bool:
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cpu":
        return False
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    capped = getattr(config, "attn_logit_softcapping", None) and not config.attention_dropout
    if implementation != "sdpa" and not (implementation == "eager" and capped):
        return False
    can = getattr(type(model), "_can_set_attn_implementation", None)
    return bool(can and can())


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    if _grids:
        grid, keys = _grid_with(query.shape[2]), _grid_with(key.shape[2])
        query, key, value = into_grid(query, grid), into_grid(key, keys), into_grid(value, keys)
        if position_bias is not None:  # of distances: each document's is the longest one's
            position_bias = position_bias[..., : query.shape[2], : key.shape[2]]
        if attention_mask is None or attention_mask.shape[0] != len(query):
            raise RuntimeError("documents in one row have a mask of their grid")
    asked = {name for name, value in more.items() if value is not None} - PLAIN
    trains = torch.is_grad_enabled() and query.requires_grad
    biased = position_bias is not None
    short = is_short(query, key, biased=biased)
    slow = not trains or dropout or (biased and not short)
    if asked or (slow and softcap is None):
        more.update(position_bias=position_bias, softcap=softcap)
        found, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **more
        )
        out = found.transpose(1, 2)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and attention_mask is None and query.shape[2] > 1
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if softcap is None and not short:
            out = blocked_attention(query, key, value, attention_mask, causal, scale)
        else:
            out = grouped_attention(
                query, key, value, attention_mask, causal, scale, position_bias, softcap
            )
    return out_of_grid(out, grid) if _grids else out.transpose(1, 2).contiguous(), None
