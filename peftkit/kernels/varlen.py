"""Documents of one row for attention that takes them apart by where each begins and ends.

`torch.nn.attention.varlen` (flash) reads queries, keys and values as they stand in the row: no
grid, no padding, no mask. What several documents begin with is in the row once: a document's
queries are its own tokens, its keys all of them, gathered. Causal attention is aligned at the end,
so that the first own token sees the whole beginning and itself.

Shapes: N tokens of the row, R documents, K keys of all of them, H heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_HEAD, HEAD_MULTIPLE = 256, 8
"""Of the flash kernel: sizes of a head."""

DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
"""Of a GPU that has the kernel."""


class Spans(NamedTuple):
    """Where documents begin and end in a row; the last one is what pads the row.

    Attributes:
        queries, keys: (R + 1,) int32, where each document's queries and keys begin and end.
        tokens: (K,) the token that each key is; empty where keys are the tokens as they stand.
        first: (N,) where among the keys each token stands first; empty likewise.
        copies: (C,) the keys that are a token again; owners: (C,) their tokens.
        longest: (most queries, most keys, 0): an empty tensor, whose shape travels with the batch
            so that nobody has to wait for the GPU to know it.
    """

    queries: Tensor
    keys: Tensor
    tokens: Tensor
    first: Tensor
    copies: Tensor
    owners: Tensor
    longest: Tensor


def spans_of(documents: Sequence[Sequence[int]], total: int) -> Spans:
    """Return where documents are in a row of so many tokens.

    Args:
        documents: Numbers of their tokens, those that no document before has ascending by one, as
            `peftkit.tasks.unpadding` numbers them: each begins with tokens of others, if any.
    """
    own, whole, tokens, used = [], [], list[int](), 0
    for document in sorted(documents, key=len, reverse=True):  # as tokens were numbered
        new = document[-1] + 1 - used
        if new > 0:  # else it is the beginning of another, and has nothing of its own
            own.append(new)
            whole.append(len(document))
            tokens += document
            used += new
    own.append(total - used)
    whole.append(total - used)
    tokens += range(used, total)
    queries, keys = (torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (own, whole))
    longest = torch.empty(max(own), max(whole), 0)
    if len(tokens) == total:
        none = torch.empty(0, dtype=torch.long)
        return Spans(queries, keys, none, none, none, none, longest)
    which = torch.tensor(tokens)
    first = torch.empty(total, dtype=torch.long)
    first[which.flip(0)] = torch.arange(len(tokens)).flip(0)  # the first has the last word
    copies = (first[which] != torch.arange(len(tokens))).nonzero().flatten()
    return Spans(queries, keys, which, first, copies, which[copies], longest)


def spans_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    *,
    is_causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return what attention makes of a row (1, H, N, D), each document for itself: (1, N, H, D).

    Args:
        window: A query sees so many keys, itself the last; None: all. Only where it is causal.
    """
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    if len(spans.tokens):
        rows[1:] = [_Gathered.apply(x, *spans[2:6]) for x in rows[1:]]
    left = -1 if window is None else window - 1
    run = kernel()
    assert run is not None
    found: Tensor = run(
        *rows,
        spans.queries,
        spans.keys,
        spans.longest.shape[0],
        spans.longest.shape[1],
        scale=scale,
        window_size=(left, 0) if is_causal else (-1, -1),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found[None]


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether the kernel is here for such tensors."""
    sizes = {x.shape[-1] for x in (query, key, value)}
    size = sizes.pop()
    return (
        not sizes
        and size <= MAX_HEAD
        and size % HEAD_MULTIPLE == 0
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and is_available(query.device)
    )


def kernel() -> Callable[..., Any] | None:
    """Return torch's kernel, whose module is slow to import; None: torch is older than 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Callable[..., Any] = varlen_attn
    return found


@cache
def is_available(device: torch.device) -> bool:
    """Tell whether a device and this torch have the kernel; its arguments changed up to 2.13."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    run = kernel()
    known = {} if run is None else inspect.signature(run).parameters
    return {
        "scale",
        "window_size",
        "enable_gqa",
    } <= known.keys() and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


class _Gathered(torch.autograd.Function):
    """Keys or values (N, H, D) of all documents, (K, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tokens: Tensor, first: Tensor, copies: Tensor, owners: Tensor
    ) -> Tensor:
        ctx.save_for_backward(first, copies, owners)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, copies, owners = ctx.saved_tensors
        (grad,) = grads
        # the few that are there again are summed in float32: there may be hundreds of one token
        own = grad.index_select(0, first).float()
        own.index_add_(0, owners, grad.index_select(0, copies).float())
        return own.to(grad.dtype), None, None, None, None
