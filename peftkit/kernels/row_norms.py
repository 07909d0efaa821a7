"""Norms of the rows of an adapted weight, for DoRA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def adapted_row_norms(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, squared_norms: Tensor
) -> Tensor:
    """Return ||W + s B A|| of each output row without forming the sum.

    ||w + s b A||^2 = ||w||^2 + 2 s b (A w) + s^2 b (A A^T) b^T for a row w of W and b of B.

    Args:
        weight: (out, in). lora_a: (R, in). lora_b: (out, R).
        squared_norms: (out,), ||w||^2, constant during training.

    Returns:
        (out,) float32.
    """
    a, b = lora_a.float(), lora_b.float()
    cross = functional.linear(weight, lora_a.to(weight.dtype)).float()  # (out, R) = W A^T
    gram = a @ a.t()  # (R, R)
    squared = squared_norms + ((2 * scaling) * cross + (scaling * scaling) * (b @ gram)).mul(b).sum(
        1
    )
    return squared.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
