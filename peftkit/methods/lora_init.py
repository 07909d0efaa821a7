"""Initialisation of LoRA's two matrices from the layer alone.

    default, gaussian   A is drawn, B is zero
    pissa               the largest part of the weight's SVD (Meng et al., 2024, arXiv:2404.02948)
    olora               the first columns of its QR (Buyukakyuz, 2024, arXiv:2406.01775)
    eva, loftq          computed before attach() from data or other weights: eva.py, loftq.py

Shapes: r rank; out, in features of the layer.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Init = Literal["default", "gaussian", "pissa", "olora", "eva", "loftq"]
SUBTRACTED = ("pissa", "olora")
"""Initial values that are subtracted again, so that the update starts at zero."""
DATA_INITS = {"eva": "eva_starts", "loftq": "loftq_starts"}
"""Initialisations that are passed to attach(), and the functions that compute them."""


def drawn(init: Init, shape: torch.Size, rank: int, generator: torch.Generator) -> Tensor:
    """Return a random A, drawn on the CPU in float32, so that a seed means the same everywhere."""
    if init == "gaussian":
        return torch.empty(shape).normal_(std=1 / rank, generator=generator)
    bound = 1 / math.sqrt(shape[-1])  # kaiming_uniform_(a=sqrt(5)), as nn.Linear itself
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def of_weight(init: Init, weight: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the initial A (r, in) and B (out, r) of a weight (out, in), float32."""
    if init == "pissa":
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        root = (s[:rank] / scaling).sqrt()
        return root[:, None] * vh[:rank], u[:, :rank] * root
    q, upper = torch.linalg.qr(weight)
    return upper[:rank], q[:, :rank]
