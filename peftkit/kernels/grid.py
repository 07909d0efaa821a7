"""Packed documents, moved into a padded grid for attention and back.

Layers that work token by token take packed rows without padding, in which a prefix that several
documents share is stored once. Attention takes a grid: a row for each document, with all of its
tokens, padded to the longest.

Shapes: N = B * L tokens in B packed rows, R documents, T positions of each, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MULTIPLE = 8
"""T is a multiple of this: products of odd sizes take three times as long."""
SIZES = 8
"""Sizes per power of two that T is rounded up to."""


class Grid(NamedTuple):
    """Positions of packed tokens in the grid. The last token belongs to no document: the padding.

    Attributes:
        tokens: (R, T) indices of tokens, N - 1 for padding; each row ends with padding.
        places: (B, L) indices into the flattened grid: the first one of a token of several
            documents, a padded one of a token of no document.
    """

    tokens: Tensor
    places: Tensor


def width_of(longest: int) -> int:
    """Return T for a longest document of this many tokens."""
    return one_of_few(longest + 1, MULTIPLE, SIZES)


def one_of_few(size: int, multiple: int, number: int) -> int:
    """Round a size up to a multiple, with at most `number` different sizes per power of two.

    oneDNN compiles a matrix product for each size: a millisecond, and 0.6 MB that are never freed.

    Args:
        multiple, number: Powers of two.
    """
    step = max(multiple, (1 << (size.bit_length() - 1)) // number)
    return -(-size // step) * step


def grid_of(documents: Sequence[Sequence[int]], shape: tuple[int, int]) -> Grid:
    """Return the grid of documents.

    Args:
        documents: Indices of each one's tokens; together these are 0, 1, ... without gaps.
        shape: (B, L), with more tokens than the documents have.
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
    # no gradient of padding, which all documents share: a value that is not finite stays in its own
    rows = torch.cat([rows[:-1], rows[-1:].detach()])
    return rows[grid.tokens].transpose(1, 2).to(x.dtype)


def out_of_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return outputs of attention (R, H, T, D) as (B, L, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)[grid.places]
