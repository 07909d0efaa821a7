"""Documents whose tokens stand one after the other, moved into a grid for attention and back.

Whatever works on each token for itself can have them in one row, or in rows cut anywhere, without
padding, and what several documents begin with once; attention wants them apart. In the grid each
has a row of its own, as wide as the longest, with all of its tokens and padding after them.

Shapes: N = B * L tokens in B rows, R documents, T places of each, S tokens of several documents, H
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MULTIPLE = 8
"""T is one of this: products of odd sizes take three times as long."""
SIZES = 8
"""And one of so many from a power of two to the next."""


class Grid(NamedTuple):
    """Which token stands where. The last token is no document's: it pads the grid.

    Attributes:
        tokens: (R, T) numbers of tokens, N - 1 where padding is; each row ends with padding.
        places: (B, L) places in the flattened grid, of a token of several documents the first; of
            tokens of no document, one with padding.
        owners: (R, T) as tokens, but N - 1 at all other places of a token.
        shared: (S,) the tokens of several documents, and padding, so that S is never below two: for
            one size of 0 or 1 torch.compile would make a graph of its own.
        copies: (S, R) all places of these, and as many with padding as there are too few.
    """

    tokens: Tensor
    places: Tensor
    owners: Tensor
    shared: Tensor
    copies: Tensor


def width_of(longest: int) -> int:
    """Return T of documents, the longest of which has so many tokens."""
    return one_of_few(longest + 1, MULTIPLE, SIZES)


def one_of_few(size: int, multiple: int, number: int) -> int:
    """Return the next multiple that is one of at most so many from a power of two to the next.

    oneDNN compiles each matrix product for each size: a millisecond, and 0.6 MB for good.

    Args:
        multiple, number: Powers of two.
    """
    step = max(multiple, (1 << (size.bit_length() - 1)) // number)
    return -(-size // step) * step


def grid_of(documents: Sequence[Sequence[int]], shape: tuple[int, int]) -> Grid:
    """Return the grid of documents.

    Args:
        documents: Numbers of their tokens; all of 0 ... are somebody's.
        shape: (B, L); more tokens than they are.
    """
    num_rows, width = len(documents), width_of(max(map(len, documents)))
    total = shape[0] * shape[1]
    pad = total - 1
    tokens = torch.full((num_rows, width), pad)
    places = torch.full((total,), width - 1)
    for number in reversed(range(num_rows)):  # so that the first has the last word
        document = torch.tensor(documents[number])
        tokens[number, : len(document)] = document
        places[document] = number * width + torch.arange(len(document))
    assert int(places[pad]) == width - 1, "the row has no token that pads the grid"
    place = torch.arange(num_rows * width).view(num_rows, width)
    owners = tokens.where(places[tokens] == place, pad)
    found, counts = tokens[tokens != pad].unique(return_counts=True)
    shared = torch.cat([found[counts > 1], torch.tensor([pad, pad])])
    copies = torch.full((len(shared), num_rows), width - 1)
    which = torch.full((total,), -1)
    which[shared[:-2]] = torch.arange(len(shared) - 2)
    row, column = (which[tokens] >= 0).nonzero(as_tuple=True)
    copies[which[tokens[row, column]], row] = place[row, column]
    return Grid(tokens, places.view(shape), owners, shared, copies)


def into_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return queries, keys or values (B, H, L, D) as (R, H, T, D)."""
    rows = x.transpose(1, 2).contiguous()  # as linear layers make them
    moved: Tensor = _IntoGrid.apply(rows, *grid)
    return moved


def out_of_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return what attention makes of them, (R, H, T, D), as (B, L, H, D)."""
    moved: Tensor = _OutOfGrid.apply(x.contiguous(), grid.places, grid.owners)
    return moved


@torch.library.custom_op("peftkit::spread", mutates_args=())
def spread(x: Tensor, tokens: Tensor) -> Tensor:
    """Return for each place the heads of its token: of x (B, L, H, D) and (R, T), (R, H, T, D).

    An operator, so that torch.compile does not make it part of a loop over single numbers: whole
    heads are copied in a fraction of the time. They come out as products want them.
    """
    heads = torch.arange(x.shape[2], device=x.device)[:, None]
    index = tokens[:, None] * len(heads) + heads  # (R, H, T)
    return x.flatten(0, 2).index_select(0, index.flatten()).unflatten(0, index.shape)


@spread.register_fake
def _like_spread(x: Tensor, tokens: Tensor) -> Tensor:
    return x.new_empty(tokens.shape[0], x.shape[2], tokens.shape[1], x.shape[3])


@torch.library.custom_op("peftkit::collected", mutates_args=())
def collected(x: Tensor, places: Tensor, shared: Tensor | None, copies: Tensor | None) -> Tensor:
    """Return for each token the heads at its places: of x (R, H, T, D) and (B, L), (B, L, H, D).

    Most have one place, so that they are gathered, which takes a fraction of adding rows to rows.

    Args:
        shared, copies: As in `Grid`: of these tokens the sum over all places; what stands at
            padding is zero. None: what stands at the first place.
    """
    flat = x.flatten(0, 2)

    def heads_at(places: Tensor) -> Tensor:
        """Return (*places, H, D)."""
        heads, width = x.shape[1:3]
        first = places + places.div(width, rounding_mode="floor") * (heads - 1) * width
        index = first[..., None] + torch.arange(0, heads * width, width, device=x.device)
        return flat.index_select(0, index.flatten()).unflatten(0, index.shape)

    out = heads_at(places)
    if shared is not None and copies is not None and len(shared) > 2:
        out.flatten(0, 1).index_copy_(0, shared, heads_at(copies).sum(1))
    return out


@collected.register_fake
def _like_collected(x: Tensor, places: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(*places.shape, x.shape[1], x.shape[3])


class _IntoGrid(torch.autograd.Function):
    """To all places of each token; nothing is learnt of padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *grid: Tensor) -> Tensor:
        tokens, places, _, shared, copies = grid
        ctx.save_for_backward(places, shared, copies)
        return spread(x, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return collected(grads[0].contiguous(), *ctx.saved_tensors), *[None] * len(Grid._fields)


class _OutOfGrid(torch.autograd.Function):
    """From the first place of each token; what attention makes at the others is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, owners: Tensor) -> Tensor:
        ctx.save_for_backward(owners)
        return collected(x, places, None, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (owners,) = ctx.saved_tensors
        return spread(grads[0].contiguous(), owners), None, None
