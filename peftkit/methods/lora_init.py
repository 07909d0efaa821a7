"""Initial values of A and B, by `method.init`:

default, gaussian   A is random, B is zero
pissa               the largest part of the weight's SVD (Meng et al., 2024, arXiv:2404.02948)
olora               the first columns of its QR (Buyukakyuz, 2024, arXiv:2406.01775)
eva, loftq          computed before attach() from data or other weights: data_init.py
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from peftkit.kernels import svd

Init = Literal["default", "gaussian", "pissa", "olora", "eva", "loftq"]
SUBTRACTED = ("pissa", "olora")
"""Initialisations whose values are subtracted: the update starts at zero."""
DATA_INITS = {"eva": "eva_starts", "loftq": "loftq_starts"}
"""Initialisations whose values are passed to attach(), with the functions that compute them."""


class Options(NamedTuple):
    """The settings of one LoRA layer; `constant_in`: columns that share a value of A."""

    rank: int
    scaling: float
    init: Init
    dtype: torch.dtype
    dropout: float
    constant_in: int


def of_weight(
    init: Init, weight: Tensor, rank: int, scaling: float, *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the initial A (r, in) and B (out, r) of a weight (out, in), float32.

    Args:
        exact: Decompose the whole weight like PEFT, for PEFT files without the initial values.
            Otherwise use a faster randomised SVD or QR of r columns: the initial values are
            subtracted again, so near-optimal ones are sufficient.
    """
    if init == "pissa" and exact:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        root = (s[:rank] / scaling).sqrt()
        return root[:, None] * vh[:rank], u[:, :rank] * root
    if init == "pissa":
        largest = svd.of_matrix(weight, rank)
        return largest.a / math.sqrt(scaling), largest.b / math.sqrt(scaling)
    if exact:
        q, upper = torch.linalg.qr(weight)
        return upper[:rank], q[:, :rank]
    q, _ = torch.linalg.qr(weight[:, :rank])  # columns of Q depend only on preceding columns
    return q.t() @ weight, q
