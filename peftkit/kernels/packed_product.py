"""Products of few rows with a packed weight on a GPU, which read its codes and store no weight.

Decoding reads every weight for each token. Unpacking writes it in 16 bits and reads it again, which
moves up to 12 bytes per value. The kernels (packed_product_kernels.py) read the codes only. nf4 and
fp4 have a product of bitsandbytes instead (packed.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peftkit.events import Fallback
from peftkit.kernels.block_scaled import KINDS
from peftkit.kernels.checked import CheckedProduct
from peftkit.kernels.fused import Launcher
from peftkit.kernels.gguf_blocks import TYPES

Weight = tuple[Tensor, tuple[Tensor, ...], Any]
"""A `packed.PackedWeight`; packed.py imports this file."""
MOST_ROWS = 16
"""Rows of x: four at a time, so a weight is unpacked up to four times in registers. With more rows
that takes longer than it saves memory traffic."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEWEST_COLUMNS = 16
"""Columns that share the load of a scale; blocks are multiples of it, or whole rows."""


def _launcher() -> Launcher:
    try:
        from peftkit.kernels import packed_product_kernels
    except ImportError:  # no Triton
        return Launcher(None)
    return Launcher(packed_product_kernels if torch.version.cuda is not None else None)


LAUNCHER = _launcher()
"""The launcher of this process."""
CHECKED = CheckedProduct(
    "peftkit's product with packed weights",
    "Report the card and the kind of base. base.quantize: nf4 uses another product.",
)
"""The products that were compared in this process."""


def has_product(x: Tensor, weight: Weight, dtype: torch.dtype) -> bool:
    """Return whether the kernels multiply x (..., in) with a packed weight."""
    packed, scales, form = weight
    if torch.compiler.is_compiling() or not x.is_cuda or form.kind in ("nf4", "fp4"):
        return False
    if x.dtype != dtype or dtype not in DTYPES or len(form.shape) != 2 or form.transposed:
        return False
    if not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
        return False
    if not all(tensor.is_contiguous() for tensor in (packed, *scales)):
        return False
    if form.kind in TYPES or form.kind == "int8":
        return True
    rows, width = form.shape
    grid = (-(-rows // form.rows), -(-width // form.block))
    is_grid = all(tuple(scale.shape) == grid for scale in scales if scale.dim() == 2)
    has_width = form.block >= width or form.block % FEWEST_COLUMNS == 0
    return form.kind in KINDS and is_grid and has_width


def product(
    x: Tensor,
    bias: Tensor | None,
    weight: Weight,
    dtype: torch.dtype,
    expected: Callable[[], Tensor],
) -> Tensor | None:
    """Return x W^T + b, (..., out); None if the kernel does not apply, run here, or is wrong.

    Args:
        expected: Computes the same by unpacking. The first products are compared with it.
    """
    if not has_product(x, weight, dtype):
        return None
    packed, scales, form = weight
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    args = (flat, packed, scales, form.kind, form.shape, form.block, form.rows, bias)

    def launched() -> Tensor | None:
        found: Tensor | None = LAUNCHER.launch("multiply", *args)
        return None if found is None else found.view(*x.shape[:-1], found.shape[-1])

    # other constants of the kernel for other numbers of rows and tensors
    key = (form.kind, form.block, form.rows, len(scales), bias is None, x.dtype, x.device)
    return CHECKED.product((*key, len(flat).bit_length()), launched, expected)


def fallbacks() -> list[Fallback]:
    """Return why products of this process unpack weights, if a kernel failed or was wrong."""
    failed = LAUNCHER.fallback(
        "Generation unpacks each packed weight for each token",
        "A token takes several times longer.",
    )
    return [one for one in (failed, CHECKED.fallback) if one is not None]
