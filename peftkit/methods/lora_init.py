"""Where the two matrices of LoRA start, as far as the layer alone says it.

    default, gaussian   A is drawn, B is zero
    pissa               of the weight's SVD the largest part (Meng et al., 2024, arXiv:2404.02948)
    olora               of its QR the first columns (Buyukakyuz, 2024, arXiv:2406.01775)
    eva, loftq          made before attach() from more than one layer: eva.py, loftq.py

Shapes: r rank; out, in features of the layer.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Init = Literal["default", "gaussian", "pissa", "olora", "eva", "loftq"]
SUBTRACTED = ("pissa", "olora")
"""Starts that are no update: what is added is the difference from them."""
DATA_INITS = {"eva": "eva_starts", "loftq": "loftq_starts"}
"""Starts that attach() is given, and the functions that make them."""


def drawn(init: Init, shape: torch.Size, rank: int, generator: torch.Generator) -> Tensor:
    """Return a random A, drawn on the CPU in float32: a seed is the same one on every device."""
    if init == "gaussian":
        return torch.empty(shape).normal_(std=1 / rank, generator=generator)
    bound = 1 / math.sqrt(shape[-1])  # kaiming_uniform_(a=sqrt(5)), as nn.Linear itself
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def of_weight(init: Init, weight: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the A (r, in) and B (out, r) that are taken out of a weight (out, in), float32."""
    if init == "pissa":
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        root = (s[:rank] / scaling).sqrt()
        return root[:, None] * vh[:rank], u[:, :rank] * root
    q, upper = torch.linalg.qr(weight)
    return upper[:rank], q[:, :rank]
