"""Products of few rows with packed weights, as one kernel of the simulated card."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.packed import PackedFormat, PackedWeight, unpack


@torch.library.custom_op("simulated::packed_product", mutates_args=())
def packed_product(
    x: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    kind: str,
    shape: Sequence[int],
    block: int,
    height: int,
    bias: Tensor | None,
) -> Tensor:
    """Return what the kernel computes of these arguments."""
    form = PackedFormat(kind, torch.Size(shape), block, height)
    weight = unpack(PackedWeight(packed, tuple(scales), form), x.dtype)
    return functional.linear(x, weight, bias)


@packed_product.register_fake
def _like_product(
    x: Tensor, packed: Tensor, scales: Sequence[Tensor], kind: str, shape: Sequence[int], *_: object
) -> Tensor:
    return x.new_empty(len(x), shape[0])


class ProductKernels:
    """Takes the place of the module of Triton kernels."""

    def multiply(self, *args: object) -> Tensor:
        """Launch it."""
        product: Tensor = packed_product(*args)
        return product
