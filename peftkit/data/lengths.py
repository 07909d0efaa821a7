"""How long rows are, and how long a batch of them is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MULTIPLE = 8
"""Rows are padded to a multiple of this: few different shapes, which matrix products like."""


def num_tokens(row: Any) -> int:
    """Return a row's length in tokens, the decoder's beside the encoder's; 0 if it does not say."""
    return sum(_lengths(row))


def tokens_of_each(rows: Sequence[Any]) -> Tensor:
    """Return each row's length in tokens (rows,); lazy rows know it without a look."""
    known: Tensor | None = getattr(rows, "num_tokens", None)
    return torch.tensor([num_tokens(row) for row in rows]) if known is None else known


def padded(*rows: Any) -> int:
    """Return how many tokens each of the rows takes in one batch, at least one.

    Encoder-decoder: the longer side, which sets the number of rows of a matrix product.
    """
    longest = map(max, zip(*map(_lengths, rows), strict=True))
    return max(rounded_up(max(longest)), 1)


def rounded_up(length: int) -> int:
    """Return how many tokens a row of this length takes."""
    return -(-length // MULTIPLE) * MULTIPLE


def _lengths(row: Any) -> tuple[int, int]:
    """Return how many tokens the model reads of a row, and how many a decoder of its own does.

    A row without tokens may say how many positions an encoder takes of it.
    """
    tokens = len(getattr(row, "input_ids", ())) or getattr(row, "num_encoder_tokens", 0)
    return tokens, getattr(row, "num_decoder_tokens", 0)
