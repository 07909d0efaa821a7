"""LoRA layers of one input, their updates beside the base, which stays as it lies.

While one adapter is trained, or several on pieces of their own; or for generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.kernels.lora_update import Layer, Piece, beside
from peftkit.methods.groups import Group
from peftkit.methods.lora_linear import LoRALinear
from peftkit.quant.layers import QuantizedLinear, frozen_weight


class SeparateWeightGroup(Group):
    """The base untouched, packed or not; updates of all layers by one product with A."""

    how = "beside the base"
    scales_a = True

    def __init__(self, members: Sequence[LoRALinear]) -> None:
        super().__init__(members)
        device, first = members[0].lora_A.device, members[0].base
        autocast = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else _dtype_of(first)
        sizes = [size.num_hidden for size in self.sizes]
        self.lora_a = torch.zeros(
            sum(sizes), members[0].in_features, dtype=self.dtype, device=device
        )
        self.lora_b = [
            torch.zeros(size.num_out, size.num_hidden, dtype=self.dtype, device=device)
            for size in self.sizes
        ]
        self.copies = [*self.lora_a.split(sizes), *self.lora_b]

    @classmethod
    def fitting(cls, layers: Sequence[LoRALinear]) -> list[list[LoRALinear]]:
        kinds: dict[Any, list[LoRALinear]] = {}
        for layer in layers:
            if is_known(layer.base) and layer.start_A is None:
                kind = _dtype_of(layer.base), layer.lora_A.device, layer.in_features
                kinds.setdefault(kind, []).append(layer)
        return list(kinds.values())

    def takes(self, x: Tensor) -> bool:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return (
            self.members[0].training
            and torch.is_grad_enabled()
            and dtype == self.dtype
            and x.device == self.lora_a.device
        )

    def products(self, x: Tensor, dropped: Tensor | None) -> Sequence[Tensor]:
        ranks = tuple(size.num_hidden for size in self.sizes)
        piece = Piece(None, tuple(range(len(ranks))), ranks)
        bases = [member.base for member in self.members]
        return products_beside(x, dropped, bases, [(piece, self)])


def products_beside(
    x: Tensor,
    dropped: Tensor | None,
    bases: Sequence[nn.Module],
    pieces: Sequence[tuple[Piece, SeparateWeightGroup | None]],
) -> tuple[Tensor, ...]:
    """Return what each base gives for x (M, in), with the updates of each piece's group.

    Args:
        dropped: As in `Group.products`.
        pieces: At least one has a group, whose layers it names by their places in `bases`.
    """
    groups = [group for _, group in pieces if group is not None]
    layers: list[Layer] = []
    frozen: list[Tensor] = []
    for base in bases:
        own, form = _base_tensors(base)
        bias = cast("Tensor | None", base.bias)
        layers.append(Layer(form, len(own), bias is not None))
        frozen += own if bias is None else [*own, bias]
    return beside(
        x.to(groups[0].dtype),
        None if dropped is None else dropped.to(groups[0].dtype),
        tuple(piece for piece, _ in pieces),
        tuple(layers),
        *(tensor for group in groups for tensor in (group.lora_a, group.scales, *group.lora_b)),
        *frozen,
        *(master for group in groups for master in group.masters()),
    )


class ServingGroup(Group):
    """For generation: the base as it is, copies of A and B that are not cast for each token."""

    how = "beside the base"

    def __init__(self, members: Sequence[LoRALinear]) -> None:
        super().__init__(members)
        self.dtype, device = _dtype_of(members[0].base), members[0].lora_A.device
        sizes = [size.num_hidden for size in self.sizes]
        shape = sum(sizes), members[0].in_features
        self.lora_a = torch.empty(shape, dtype=self.dtype, device=device)
        self.copies = [
            *self.lora_a.split(sizes),
            *(torch.empty(size, dtype=self.dtype, device=device) for size in self.sizes),
        ]

    @classmethod
    def fitting(cls, layers: Sequence[LoRALinear]) -> list[list[LoRALinear]]:
        return SeparateWeightGroup.fitting(layers)

    def takes(self, x: Tensor) -> bool:
        return (
            not torch.is_grad_enabled()
            and not self.members[0].training
            and x.dtype == self.dtype
            and x.device == self.lora_a.device
            and not torch.is_autocast_enabled(x.device.type)
        )

    def products(self, x: Tensor, dropped: Tensor | None) -> Sequence[Tensor]:
        hidden = functional.linear(x, self.lora_a)
        parts = hidden.split([size.num_hidden for size in self.sizes], 1)
        scaled = self.copies[len(self.members) :]
        return [
            torch.addmm(member.base(x), part, lora_b.t())
            for member, part, lora_b in zip(self.members, parts, scaled, strict=True)
        ]


def is_known(base: nn.Module) -> bool:
    """Tell whether it is one whose weight is known, packed or not."""
    return isinstance(base, QuantizedLinear) or frozen_weight(base) is not None


def _dtype_of(base: nn.Module) -> torch.dtype:
    """Return the dtype that a base computes in."""
    weight = frozen_weight(base)
    if weight is not None:
        return weight.dtype
    assert isinstance(base, QuantizedLinear)
    return base.packing.dtype


def _base_tensors(base: nn.Module) -> tuple[list[Tensor], Any]:
    """Return the weight and how it is packed; its scales follow it where it is."""
    weight = frozen_weight(base)
    if weight is not None:
        return [weight], None
    assert isinstance(base, QuantizedLinear)
    return [base.packed, *base.packing.scales], base.packing.form
