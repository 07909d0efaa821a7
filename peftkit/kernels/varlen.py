"""Attention of packed documents: by their offsets in the row, or in a padded grid.

Token-wise layers process packed rows without padding, in which a shared prefix of several documents
is stored once. Attention has two layouts:

- `Spans`: torch's varlen (flash) kernel reads queries, keys and values in place, without padding or
  mask. A document's queries are its tokens after the prefix, its keys also include the gathered
  prefix. Causal attention is aligned at the end: the first query attends to the whole prefix and
  itself.
- `Grid`: a row for each document, with all of its tokens, padded to the longest.

Shapes: N = B * L tokens in B packed rows (1 for spans), R documents, K keys in all documents, T
positions per document in a grid, H heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

MAX_HEAD, HEAD_MULTIPLE = 256, 8
"""Limits of the flash kernel for the head size."""
NEEDS_MEMORY = range(193, 225)
"""Head sizes whose backward pass needs the shared memory of an A100, H100 or B200 (flash_api.cpp of
torch). Larger ones have another kernel."""

DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
"""Lowest compute capability with the kernel."""
KEYS = 16, 16
"""Rounded numbers of keys are multiples of the first, and have so many sizes per power of two."""
MIN_DOCUMENTS, MIN_LONGEST = 4, 64
"""Smallest rounded numbers of documents, and of tokens of the longest one."""


class Spans(NamedTuple):
    """Offsets of documents in a row; the last document is the row's padding.

    Attributes:
        queries, keys: (R + 1,) int32, offsets of each document's queries and keys.
        tokens: (K,) the token of each key; empty if the keys are the tokens in order.
        first: (N,) each token's first position among the keys; empty in the same case.
        copies: (C,) the keys that repeat a token; owners: (C,) their tokens.
        longest: (max queries, max keys, N, 0): an empty tensor whose shape carries these numbers,
            to read them without synchronising with the GPU.
    """

    queries: Tensor
    keys: Tensor
    tokens: Tensor
    first: Tensor
    copies: Tensor
    owners: Tensor
    longest: Tensor


def spans_of(documents: Sequence[Sequence[int]], total: int, *, rounds: bool = False) -> Spans:
    """Return the offsets of documents in a row of `total` tokens.

    Args:
        documents: Token indices of each document, numbered as in `peftkit.forward.padding_free`: a
            shared prefix first, then new tokens, ascending by one.
        rounds: Whether all sizes are rounded up, so that batches have few different shapes: by
            empty documents before the padding, and by keys of the padding.
    """
    num_queries, num_keys, tokens, used = [], [], list[int](), 0
    for document in sorted(
        documents, key=len, reverse=True
    ):  # the order in which tokens are numbered
        new = document[-1] + 1 - used
        if new > 0:  # otherwise it is a prefix of another document
            num_queries.append(new)
            num_keys.append(len(document))
            tokens += document
            used += new
    padding = total - used
    if rounds:
        num_documents, num_all_keys = len(num_keys) + 1, len(tokens) + padding
        empty_ones = [0] * (rounded_size(num_documents, MIN_DOCUMENTS, 1) - num_documents)
        num_queries, num_keys = num_queries + empty_ones, num_keys + empty_ones
        if num_all_keys > total:  # keys of the last token, before the padding's keys in order
            tokens += [total - 1] * (rounded_size(num_all_keys, *KEYS) - num_all_keys)
    num_queries.append(padding)
    num_keys.append(len(tokens) + padding - sum(num_keys))
    tokens += range(used, total)
    queries, keys = (
        torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (num_queries, num_keys)
    )
    sizes = max(num_queries), max(num_keys)
    if rounds:  # a power of two costs blocks of threads that end at their first instruction
        sizes = rounded_size(sizes[0], MIN_LONGEST, 1), rounded_size(sizes[1], MIN_LONGEST, 1)
    longest = torch.empty(*sizes, total, 0)
    if len(tokens) == total:
        empty = torch.empty(0, dtype=torch.long)
        return Spans(queries, keys, empty, empty, empty, empty, longest)
    index = torch.tensor(tokens)
    first = torch.empty(total, dtype=torch.long)
    first[index.flip(0)] = torch.arange(len(tokens)).flip(0)  # the first position is written last
    copies = (first[index] != torch.arange(len(tokens))).nonzero().flatten()
    return Spans(queries, keys, index, first, copies, index[copies], longest)


def spans_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    *,
    is_causal: bool,
    scale: float,
    window: int | None,
    by_cudnn: bool = False,
) -> Tensor:
    """Return attention within each document of a row (1, H, N, D): (1, N, H, D).

    Args:
        window: Number of keys per query, including its own; None means all. Causal attention only.
        by_cudnn: See `has_cudnn`.
    """
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    if len(spans.tokens):
        rows[1:] = [gathered(x, spans) for x in rows[1:]]
    left = -1 if window is None else window - 1
    keys = spans.queries if by_cudnn else spans.keys  # torch requires the same tensor for cuDNN
    backend = SDPBackend.CUDNN_ATTENTION if by_cudnn else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend) if _chooses_backend() else nullcontext():
        out: Tensor = kernel()(
            *rows,
            spans.queries,
            keys,
            spans.longest.shape[0],
            spans.longest.shape[1],
            scale=scale,
            window_size=(left, 0) if is_causal else (-1, -1),
        )
    return out[None]


def has_cudnn(spans: Spans, window: int | None) -> bool:
    """Return whether torch may compute these documents, without a window or prefix, by cuDNN."""
    is_bare = window is None and not len(spans.tokens)
    return is_bare and not torch.compiler.is_compiling() and _chooses_backend()


@cache
def _chooses_backend() -> bool:
    """Return whether torch's kernel runs FlashAttention or cuDNN, from torch 2.15 on."""
    from torch.nn.attention import varlen

    return hasattr(varlen, "_select_backend") and torch.backends.cudnn.is_available()


def gathered(x: Tensor, spans: Spans) -> Tensor:
    """Return rows (N, H, D) of tokens in the order of the keys (K, H, D)."""
    rows: Tensor = _Gathered.apply(x, spans.tokens, spans.first, spans.copies, spans.owners, None)
    return rows


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these tensors."""
    sizes = {x.shape[-1] for x in (query, key, value)}
    size = sizes.pop()
    return (
        not sizes
        and size <= MAX_HEAD
        and size % HEAD_MULTIPLE == 0
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and is_available(query.device)
        and (size not in NEEDS_MEMORY or _has_large_memory(query.device))
    )


@cache
def kernel() -> Callable[..., Any]:
    """Return torch's kernel for grouped heads, whose module is slow to import."""
    from torch.nn.attention.varlen import varlen_attn

    attend: Callable[..., Any] = varlen_attn
    # before 2.12 the kernel takes grouped heads without the argument
    has_argument = "enable_gqa" in inspect.signature(attend).parameters
    return partial(attend, enable_gqa=True) if has_argument else attend


@cache
def is_available(device: torch.device) -> bool:
    """Return whether the device supports the kernel."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


@cache
def _has_large_memory(device: torch.device) -> bool:
    """Return whether a multiprocessor has the shared memory of a data center's GPU."""
    capability = torch.cuda.get_device_capability(device)
    return capability in ((8, 0), (9, 0)) or capability[0] == 10


class _Gathered(torch.autograd.Function):
    """Gathers rows (N, H, D) of tokens into the documents' order (K, H, D).

    Its gradient takes a token's first row and adds the copies. torch's gradient of an index sums
    all rows one by one, which took 6% of a training step on a CPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tokens: Tensor,
        first: Tensor,
        copies: Tensor,
        owners: Tensor,
        unused: Tensor | None,
    ) -> Tensor:
        """Return the rows; `unused` (N,): whether a token is in no document, thus no gradient."""
        ctx.save_for_backward(first, copies, owners, unused)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, copies, owners, unused = ctx.saved_tensors
        (grad,) = grads
        # copies are summed in at least float32: a token may have hundreds
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad_x = grad.index_select(0, first).to(wide)
        grad_x.index_add_(0, owners, grad.index_select(0, copies).to(wide))
        if unused is not None:  # masked, not multiplied: padding may be infinite
            grad_x.masked_fill_(unused[:, None, None], 0.0)
        return grad_x.to(grad.dtype), None, None, None, None, None


MULTIPLE = 8
"""T is a multiple of this: products of odd sizes take three times as long."""
SIZES = 8
"""Sizes per power of two that T is rounded up to."""


class Grid(NamedTuple):
    """Positions of packed tokens in the grid. The last token is padding and in no document.

    Attributes:
        tokens: (R, T) indices of tokens, N - 1 for padding; each row ends with padding.
        places: (B, L) indices into the flattened grid: the first position of a shared token, a
            padding position for a token in no document.
        copies: (C,) indices into the flattened grid where a shared token repeats; two of them are
            padding, because torch compiles special code for sizes 0 and 1.
        unused: (B * L,) whether a token is in no document.
    """

    tokens: Tensor
    places: Tensor
    copies: Tensor
    unused: Tensor


def width_of(longest: int) -> int:
    """Return T for a longest document of this many tokens."""
    return rounded_size(longest + 1, MULTIPLE, SIZES)


def rounded_size(size: int, multiple: int, number: int) -> int:
    """Round a size up to a multiple, with at most `number` different sizes per power of two.

    oneDNN compiles a matrix product for each size: a millisecond and 0.6 MB that are never freed.

    Args:
        multiple, number: Powers of two.
    """
    step = max(multiple, (1 << (size.bit_length() - 1)) // number)
    return -(-size // step) * step


def grid_of(documents: Sequence[Sequence[int]], shape: tuple[int, int]) -> Grid:
    """Return the grid of documents.

    Args:
        documents: Token indices of each document; together these are 0, 1, ... without gaps.
        shape: (B, L), with more tokens than the documents.
    """
    num_rows, width = len(documents), width_of(max(map(len, documents)))
    total = shape[0] * shape[1]
    pad = total - 1
    tokens = torch.full((num_rows, width), pad)
    places = torch.full((total,), width - 1)
    for number in reversed(range(num_rows)):  # the first document overwrites the others
        document = torch.tensor(documents[number])
        tokens[number, : len(document)] = document
        places[document] = number * width + torch.arange(len(document))
    assert int(places[pad]) == width - 1, "the row has no token that pads the grid"
    flat, unused = tokens.flatten(), places == width - 1
    again = ~unused[flat] & (places[flat] != torch.arange(len(flat)))
    copies = torch.cat([again.nonzero().flatten(), places[pad].expand(2)])
    return Grid(tokens, places.view(shape), copies, unused)


def into_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return queries, keys or values (B, H, L, D) as (R, H, T, D)."""
    tokens = grid.tokens.flatten()
    rows = x.transpose(1, 2).flatten(0, 1)
    in_grid: Tensor = _Gathered.apply(
        rows, tokens, grid.places.flatten(), grid.copies, tokens[grid.copies], grid.unused
    )
    return in_grid.unflatten(0, grid.tokens.shape).transpose(1, 2)


def out_of_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return outputs of attention (R, H, T, D) as (B, L, H, D)."""
    rows = x.transpose(1, 2).flatten(0, 1).index_select(0, grid.places.flatten())
    return rows.unflatten(0, grid.places.shape)
