"""LoRA layers of one input, computed together; joined with their base, for one. See beside.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.kernels.grouped import ALIGNMENT, GroupedLinear, Member
from peftkit.methods.lora_linear import LoRALinear
from peftkit.quant.layers import frozen_weight, set_frozen_weight

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
            if weight is not None and layer.start_A is None:
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
