"""LoftQ: B A is initialised with the quantisation error  (Li et al., 2023, arXiv:2310.08659).

s B A is the best matrix of rank r for W - Q, where W is the original weight, Q the quantised one
and s the scaling; the model begins nearer to the unquantised one than its base is. The paper goes
on from there, quantising W - s B A and so forth, T times. Here T is 1, always: after more the base
would not be the one that its name and its fingerprint say, and the adapter would fit no other.

Shapes: r rank; out, in features of the layer.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from peftkit.errors import TargetError
from peftkit.kernels import svd
from peftkit.methods.lora import LoRA
from peftkit.methods.protocol import InitValues
from peftkit.quant.layers import weight_of


@torch.no_grad()
def loftq_starts(model: nn.Module, method: LoRA, original: nn.Module) -> dict[str, InitValues]:
    """Return initial values for a LoRA with init "loftq", from the unquantised model.

    Args:
        model: The bare, quantised base.
        method: Says which layers and ranks.
        original: The same model before quantising, on any device; only read.

    Returns:
        The initial values for `attach(model, method, starts=starts)`.

    Raises:
        TargetError: A target is no linear layer, is not in this model, or is not quantised.
    """
    starts: dict[str, InitValues] = {}
    for site in method.linear_sites(model):
        quantized = weight_of(model.get_submodule(site.path)).float()
        weight = weight_of(original.get_submodule(site.path))
        lost = weight.to(quantized.device, torch.float32) - quantized  # (out, in)
        if not lost.any():
            raise TargetError(
                f"init 'loftq' needs a quantisation error in {site.path}",
                found="the weight equals the original",
                fix="Quantise the base (base.quantize), or leave this layer out of the targets.",
            )
        rank, scaling = method.scale_of(site)
        # of a fused layer each role has a pair of its own
        parts = [lost[rows.to(lost.device)] for rows in site.rows.values()] if site.rows else [lost]
        best = [svd.of_matrix(part, rank) for part in parts]
        root = math.sqrt(scaling)
        starts[site.path] = (
            torch.cat([part.a for part in best]) / root,
            torch.cat([part.b for part in best]) / root,
        )
    return starts
