"""Documents whose tokens stand one after the other, moved into a grid for attention and back.

Whatever works on each token for itself can have them in one row, or in rows cut anywhere, without
padding, and what several documents begin with once; attention wants them apart. In the grid each
has a row of its own, as wide as the longest, with all of its tokens and padding after them.

Shapes: N = B * L tokens in B rows, R documents, T places of each, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    """

    tokens: Tensor
    places: Tensor


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
    return Grid(tokens, places.view(shape))


def into_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return queries, keys or values (B, H, L, D) as (R, H, T, D)."""
    # not in 16 bits, for the backward pass sums over all documents that have a token
    rows = x.transpose(1, 2).flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    # nothing is learnt of padding, which all documents share: what is not finite in one stays there
    rows = torch.cat([rows[:-1], rows[-1:].detach()])
    return rows[grid.tokens].transpose(1, 2).to(x.dtype)


def out_of_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return what attention makes of them, (R, H, T, D), as (B, L, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)[grid.places]
