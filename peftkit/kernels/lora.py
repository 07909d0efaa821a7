"""The low-rank update and its companions, in plain torch.

Shapes: M rows of input (batch and time flattened), in/out features, R rank.
Neither B A nor a gradient of W is ever formed: the two skinny products are all there is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def add_lora(base_out: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """Return ``base_out + scaling * x A^T B^T`` (Hu et al., 2021, eq. 3).

    The scaled B and one addmm leave no temporary of the output's size, and autograd's own formulas
    are then the minimal ones: G = dY (sB), dA = G^T x, dB = s dY^T (x A^T), dx = G A.

    Args:
        base_out: (..., out), the frozen layer's output.
        x: (..., in), the layer's input (after dropout).
        lora_a: (R, in). lora_b: (out, R). Both are cast to `base_out`'s dtype here.
        scaling: alpha / r.
    """
    dtype = base_out.dtype
    hidden = functional.linear(x.to(dtype), lora_a.to(dtype))  # (..., R)
    scaled_b = (scaling * lora_b).to(dtype)  # (out, R), scaled in the adapter's precision
    flat = torch.addmm(
        base_out.reshape(-1, base_out.shape[-1]),
        hidden.reshape(-1, hidden.shape[-1]),
        scaled_b.t(),
    )
    return flat.view(base_out.shape)


def low_rank(x: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """Return ``x A^T B^T`` (..., out); shapes as in `add_lora`."""
    return functional.linear(functional.linear(x, lora_a.to(x.dtype)), lora_b.to(x.dtype))


def adapted_row_norms(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, squared_norms: Tensor
) -> Tensor:
    """Return ||W + s B A|| of each output row without forming the sum.

    ||w + s b A||^2 = ||w||^2 + 2 s b (A w) + s^2 b (A A^T) b^T for a row w of W and b of B.

    Args:
        weight: (out, in). lora_a: (R, in). lora_b: (out, R).
        squared_norms: (out,), ||w||^2, which training never changes.

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
