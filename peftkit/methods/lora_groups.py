"""LoRA layers of one input, computed together, in one of two layouts.

- `FusedWeightGroup`: base and scaled B side by side, so that one product computes both;
- `SeparateWeightGroup`: the base as it lies, packed or not, and updates of all layers by one
  product with A; also of several adapters on pieces of the rows, and for generation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.kernels.grouped import ALIGNMENT, GroupedLinear, Member
from peftkit.kernels.lora_update import Layer, Piece, beside
from peftkit.methods.lora_linear import LoRALinear
from peftkit.quant.layers import QuantizedLinear, frozen_weight, set_frozen_weight

MISSES = 2
"""So often in turn another input than that of the last layer: they do not read one."""


class SharedInputGroup(ABC):
    """Layers of one input: the first that is called computes all, the others find their part."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self._layers = list(members)
        self._misses = 0
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    @abstractmethod
    def compute(self, x: Tensor) -> Sequence[Tensor]:
        """Return what each layer gives for x (..., in)."""

    @property
    def is_broken(self) -> bool:
        """Whether the layers are called with different inputs."""
        return self._misses >= MISSES and len(self._layers) > 1

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return what a layer gives for x."""
        index = self._layers.index(layer)
        if self._input is not x or index not in self._parts:
            if self._parts:
                self._misses += 1
            self._input, self._parts = x, dict(enumerate(self.compute(x)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input, self._misses = None, 0
        return part

    def forget(self) -> None:
        """Let go of what was computed with other A and B."""
        self._input, self._parts = None, {}


class Group(SharedInputGroup):
    """LoRA layers of one input.

    Attributes:
        how: In words, for the header of a run.
        members: The layers, in the order of their rows.
        copies: Where A of each member and then B of each go.
        scales_a: Whether it is A that is scaled there, or B.
    """

    how = ""
    scales_a = False
    copies: list[Tensor]

    def __init__(self, members: Sequence[LoRALinear]) -> None:
        super().__init__(members)
        self.members = list(members)
        self.sizes = tuple(Member(m.out_features, m.lora_A.shape[0]) for m in members)
        self.dropout = members[0].dropout
        scales = [m.scaling for m in members for _ in range(m.lora_A.shape[0])]
        self.scales = torch.tensor(scales, device=members[0].lora_A.device)
        self._seen: list[int] = []
        for member in members:
            member.group = self

    @classmethod
    @abstractmethod
    def fitting(cls, layers: Sequence[LoRALinear]) -> list[list[LoRALinear]]:
        """Return those layers that can be computed like this, as far as they are of one kind."""

    @abstractmethod
    def takes(self, x: Tensor) -> bool:
        """Tell whether to compute together: only in training, where a rounding more is none."""

    @abstractmethod
    def products(self, x: Tensor, dropped: Tensor | None) -> Sequence[Tensor]:
        """Return what each layer gives for x (M, in), whose A reads `dropped`."""

    def output(self, layer: LoRALinear, x: Tensor) -> Tensor:
        """Return what a layer gives for x."""
        if not torch.compiler.is_compiling() and self._seen != self._versions():
            copy_masters([self])
        return self.part(layer, x)

    def compute(self, x: Tensor) -> Sequence[Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        dropped = None if isinstance(self.dropout, nn.Identity) else self.dropout(flat)
        outputs = self.products(flat, dropped)
        return [out.view(*x.shape[:-1], out.shape[-1]) for out in outputs]

    def _versions(self) -> list[int]:
        return [tensor._version for m in self.members for tensor in (m.lora_A, m.lora_B)]

    def mark_fresh(self) -> None:
        """Note that `copies` are what A and B are; let go of what was computed with others."""
        self._seen = self._versions()
        self.forget()

    def masters(self) -> list[Tensor]:
        """Return what gradients go to: A of each member, then B of each."""
        return [m.lora_A for m in self.members] + [m.full_b() for m in self.members]

    def release(self) -> None:
        """Let every layer compute by itself again."""
        for member in self.members:
            member.group = None


@torch.no_grad()
def copy_masters(groups: Sequence[Group]) -> None:
    """Let groups take over A and B as they are now: a handful of kernels for all of them.

    No trace is left in the versions of the copies, so that two passes may come before one backward.
    """
    if not groups:
        return
    sources: list[Tensor] = []
    scales: list[float] = []
    for group in groups:
        own, ones = [member.scaling for member in group.members], [1.0] * len(group.members)
        sources += [member.full_a().detach() for member in group.members]
        sources += [member.full_b().detach() for member in group.members]
        scales += own + ones if group.scales_a else ones + own
    sources = list(torch._foreach_mul(sources, scales))
    torch._foreach_copy_([copy.data for group in groups for copy in group.copies], sources)
    for group in groups:
        group.mark_fresh()


class FusedWeightGroup(Group):
    """Base and scaled B in one block of memory, so that one product computes both.

    The layers' own weights become views of it: this costs no second copy.
    """

    how = "joined with the base"

    def __init__(self, members: Sequence[LoRALinear]) -> None:
        super().__init__(members)
        weights = [weight for m in members if (weight := frozen_weight(m.base)) is not None]
        num_in, like = members[0].in_features, weights[0]
        hidden = sum(size.num_hidden for size in self.sizes)
        padded = -(-hidden // ALIGNMENT) * ALIGNMENT
        self.weight = like.new_zeros(sum(w.shape[0] for w in weights), num_in + padded)
        self.lora_a = like.new_zeros(padded, num_in)
        self.bias = self._joined_bias()
        copies_a, copies_b, row, column = [], [], 0, 0
        for member, weight, size in zip(members, weights, self.sizes, strict=True):
            rows, columns = slice(row, row + size.num_out), slice(column, column + size.num_hidden)
            view = self.weight[rows, :num_in]
            view.copy_(weight)
            set_frozen_weight(member.base, view)
            copies_a.append(self.lora_a[columns])
            copies_b.append(self.weight[rows, num_in:][:, columns])
            row, column = rows.stop, columns.stop
        self.copies = copies_a + copies_b

    @classmethod
    def fitting(cls, layers: Sequence[LoRALinear]) -> list[list[LoRALinear]]:
        kinds: dict[Any, list[LoRALinear]] = {}
        for layer in layers:
            weight = frozen_weight(layer.base)
            if weight is not None and layer.initial_A is None:
                kind = weight.dtype, weight.device, layer.in_features
                kinds.setdefault(kind, []).append(layer)
        return list(kinds.values())

    def _joined_bias(self) -> Tensor | None:
        biases = [member.bias for member in self.members]
        if all(bias is None for bias in biases):
            return None
        return torch.cat(
            [
                self.weight.new_zeros(size.num_out) if bias is None else bias.detach()
                for size, bias in zip(self.sizes, biases, strict=True)
            ]
        )

    def takes(self, x: Tensor) -> bool:
        return (
            self.members[0].training
            and torch.is_grad_enabled()
            and x.dtype == self.weight.dtype
            and x.device == self.weight.device
            and not torch.is_autocast_enabled(x.device.type)
        )

    def products(self, x: Tensor, dropped: Tensor | None) -> Sequence[Tensor]:
        found: Sequence[Tensor] = GroupedLinear.apply(
            x,
            dropped,
            self.weight,
            self.lora_a,
            self.scales,
            self.bias,
            self.sizes,
            *self.masters(),
        )
        return found

    def release(self) -> None:
        """Give the layers their weights back, each in memory of its own."""
        super().release()
        for member in self.members:
            weight = frozen_weight(member.base)
            assert weight is not None
            set_frozen_weight(member.base, weight.clone())


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
            if is_known(layer.base) and layer.initial_A is None:
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


class ServingGroup(SeparateWeightGroup):
    """For generation: copies of A and B that are not cast for each token."""

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
        return [
            torch.addmm(member.base(x), part, lora_b.t())
            for member, part, lora_b in zip(self.members, parts, self.lora_b, strict=True)
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
