"""GPTQ: codes of a weight that keep a layer's outputs on given inputs (arXiv:2210.17323).

Columns are rounded one after the other, and the error of each is carried into the later ones with
the inverse of X'X: (W - Q) X' is small, not W - Q. A block's scale is chosen when its first column
is reached, from the weights with the errors so far. The formats are those of fake_quantize.py; any
program that reads them reads the result.

Shapes: weight (out, in), gram = X'X (in, in), g values of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peftkit.kernels.fake_quantize import FORMATS, Coded

DAMP = 0.01
"""Added to the diagonal of X'X, relative to its mean: inputs that rarely occur."""
RANGES = {"q4_0": (0, 15), "q4_1": (0, 15), "int4_32": (-8, 7), "int4_128": (-8, 7)}
"""Lowest and highest code of the supported formats."""


def gptq(weight: Tensor, gram: Tensor, kind: str) -> Coded:
    """Return a weight in codes: (out * in / g, g), row by row.

    Args:
        weight: float32; its columns are a multiple of the format's group.
        kind: One of `RANGES`.
    """
    group, _, code = FORMATS[kind]
    low, high = RANGES[kind]
    weight, inverse = weight.clone(), _inverse_factor(gram)
    blocks = []
    for start in range(0, weight.shape[1], group):
        block = weight[:, start : start + group]
        grid = code(block)
        offset = torch.zeros_like(grid.scale) if grid.offset is None else grid.offset
        steps = torch.where(grid.scale == 0, 0.0, 1 / grid.scale)
        codes, errors = torch.empty_like(block), torch.empty_like(block)
        for i in range(group):
            column = block[:, i : i + 1]
            rounded = ((column - offset) * steps + grid.zero).round_().clamp_(low, high)
            value = (rounded - grid.zero) * grid.scale + offset
            error = (column - value) / inverse[start + i, start + i]
            codes[:, i], errors[:, i] = rounded[:, 0], error[:, 0]
            block[:, i:] -= error * inverse[start + i, start + i : start + group]
        weight[:, start + group :] -= errors @ inverse[start : start + group, start + group :]
        blocks.append(Coded(codes, grid.zero, grid.scale, grid.offset))
    codes = torch.stack([block.codes for block in blocks], 1).view(-1, group)
    scale = torch.stack([block.scale for block in blocks], 1).view(-1, 1)
    offsets = [block.offset for block in blocks if block.offset is not None]
    minimum = torch.stack(offsets, 1).view(-1, 1) if offsets else None
    return Coded(codes, blocks[0].zero, scale, minimum)


def _inverse_factor(gram: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of X'X, in float32."""
    hessian = gram.double()
    mean = hessian.diagonal().mean()
    hessian = hessian + torch.eye(len(hessian), dtype=torch.float64) * (DAMP * mean + 1e-8)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True).float()
