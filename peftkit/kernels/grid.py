"""Documents that stand one after the other in a row, moved into a grid for attention and back.

Whatever works on each token for itself can have them in one row, without padding; attention wants
them apart. In the grid each has a row of its own, as wide as the longest, and the padding between.

Shapes: N tokens of the row, R documents, T places of each, H heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MULTIPLE = 8
"""T is one of this: products of odd sizes take three times as long."""


class Grid(NamedTuple):
    """Which token stands where. The row's last token is no document's: it pads the grid.

    Attributes:
        tokens: (R, T) numbers of tokens, N - 1 where padding is; each row ends with padding.
        places: (N,) places in the flattened grid; of tokens of no document, one with padding.
    """

    tokens: Tensor
    places: Tensor


def width_of(longest: int) -> int:
    """Return T of documents, the longest of which has so many tokens."""
    return (longest // MULTIPLE + 1) * MULTIPLE


def grid_of(lengths: Tensor, total: int) -> Grid:
    """Return the grid of documents of these lengths (R,), in a row of so many tokens, or more."""
    used, num_rows = int(lengths.sum()), len(lengths)
    assert used < total, "the row has no token that pads the grid"
    width = width_of(int(lengths.max()))
    place = torch.arange(num_rows * width).view(num_rows, width)
    real = place % width < lengths[:, None]
    places = torch.full((total,), width - 1)
    places[:used] = place[real]
    tokens = torch.full_like(place, total - 1)
    tokens[real] = torch.arange(used)
    return Grid(tokens, places)


def into_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return queries, keys or values (1, H, N, D) as (R, H, T, D)."""
    rows = x[0].transpose(0, 1).contiguous()  # (N, H, D), as linear layers make them
    moved: Tensor = _Moved.apply(rows, grid.tokens.flatten(), grid.places)
    return moved.unflatten(0, grid.tokens.shape).transpose(1, 2)


def out_of_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return what attention makes of them, (R, T, H, D), as (1, N, H, D)."""
    moved: Tensor = _Moved.apply(x.flatten(0, 1), grid.places, grid.tokens.flatten())
    return moved[None]


@torch.library.custom_op("peftkit::gathered", mutates_args=())
def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] along the first dimension.

    An operator, so that torch.compile does not make it part of a loop over single numbers: whole
    rows are copied in a fraction of the time.
    """
    return x.index_select(0, index)


@gathered.register_fake
def _like_gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], *x.shape[1:])


class _Moved(torch.autograd.Function):
    """x[index] along the first dimension, whose gradient is gathered too.

    Only padding is there twice, and nothing is learnt of it: its gradient is zero, and need not be
    summed, which is what makes the backward pass of `index_select` slow.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return gathered(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gathered(grads[0].contiguous(), back), None, None
