"""Which LoRA layers are computed together while a model trains: those that read one input.

A group's frozen weights lie in one block of memory beside its scaled B (kernels/grouped.py); the
layers' own weights become views of it, so that this costs no second copy. It is laid out when the
model first trains, filled anew whenever the adapter has changed, and given up by `detach`.

The first layer of a group that is called computes all of it and the others find their part. That
they are called with the same input is known by the tensor itself: a group whose layers get another
is broken up, and each computes on its own, as do layers that cannot be in a group: over packed
weights of which no copy is kept, with a subtracted start, in another dtype, under autocast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.kernels.grouped import ALIGNMENT, GroupedLinear, Member
from peftkit.methods.lora_linear import LoRALinear
from peftkit.methods.protocol import AdapterModule
from peftkit.model.places import find_places
from peftkit.quant.layers import frozen_weight, set_frozen_weight

SHARING = ({"q", "k", "v"}, {"gate", "up"})
"""Last parts of roles whose layers, side by side in one module, read the same input."""


class Group:
    """Layers of one input, laid out together.

    Attributes:
        members: The layers, in the order of their rows.
        broken: Whether one of them was called with another input.
    """

    def __init__(self, members: list[LoRALinear]) -> None:
        self.members = members
        self.broken = False
        self.sizes = tuple(Member(m.out_features, m.lora_A.shape[0]) for m in members)
        weights = [weight for m in members if (weight := frozen_weight(m.base)) is not None]
        num_in, like = members[0].in_features, weights[0]
        hidden = sum(size.num_hidden for size in self.sizes)
        padded = -(-hidden // ALIGNMENT) * ALIGNMENT
        self.weight = like.new_zeros(sum(w.shape[0] for w in weights), num_in + padded)
        self.lora_a = like.new_zeros(padded, num_in)
        scales = [m.scaling for m in members for _ in range(m.lora_A.shape[0])]
        self.scales = torch.tensor(scales, device=like.device)
        self.bias = self._joined_bias()
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        start = 0
        for member, weight in zip(members, weights, strict=True):
            view = self.weight[start : start + weight.shape[0], :num_in]
            view.copy_(weight)
            set_frozen_weight(member.base, view)
            start += weight.shape[0]
        self.dropout = members[0].dropout
        for member in members:
            member.group = self

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

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over A and B as they are now.

        Always: torch's fused optimizers change a tensor without a trace in its version. For the
        same reason no trace is left here either, so that two passes may come before one backward.
        """
        lora_a, weight = self.lora_a.data, self.weight.data
        row, column, num_in = 0, 0, lora_a.shape[1]
        for member, size in zip(self.members, self.sizes, strict=True):
            lora_a[column : column + size.num_hidden].copy_(member.full_a())
            block = weight[row : row + size.num_out, num_in + column :]
            block[:, : size.num_hidden].copy_(member.scaling * member.full_b())
            row, column = row + size.num_out, column + size.num_hidden

    def takes(self, x: Tensor) -> bool:
        """Tell whether to compute together: only in training, where a rounding more is none."""
        return (
            self.members[0].training
            and torch.is_grad_enabled()
            and x.dtype == self.weight.dtype
            and not torch.is_autocast_enabled(x.device.type)
        )

    def output(self, layer: LoRALinear, x: Tensor) -> Tensor:
        """Return what a layer gives for x."""
        if self._input is not x:
            if self._parts:  # left by layers that were called with another input
                self.broken = True
            self._input, self._parts = x, self._compute(x)
        part = self._parts.pop(self.members.index(layer))
        if not self._parts:
            self._input = None
        return part

    def _compute(self, x: Tensor) -> dict[int, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        dropped = None if isinstance(self.dropout, nn.Identity) else self.dropout(flat)
        masters = [m.lora_A for m in self.members] + [m.full_b() for m in self.members]
        outputs = GroupedLinear.apply(
            flat, dropped, self.weight, self.lora_a, self.scales, self.bias, self.sizes, *masters
        )
        return {n: out.view(*x.shape[:-1], out.shape[-1]) for n, out in enumerate(outputs)}

    def forget(self) -> None:
        """Let go of what a pass that did not come to its end has left."""
        self._input, self._parts = None, {}

    def release(self) -> None:
        """Give the layers their weights back, each in memory of its own."""
        for member in self.members:
            weight = frozen_weight(member.base)
            assert weight is not None
            set_frozen_weight(member.base, weight.clone())
            member.group = None


class Grouping:
    """The groups of an adapter: made when its model first trains, gone when it is removed."""

    def __init__(self, model: nn.Module, modules: Mapping[str, AdapterModule]) -> None:
        self._sets = list(_sharing(model, modules))
        self._groups: list[Group] = []
        self._laid_out = False
        self._handle = model.register_forward_pre_hook(self._before)

    def _before(self, model: nn.Module, args: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        if not self._laid_out:
            self._laid_out = True
            self._groups = [Group(members) for found in self._sets for members in _fitting(found)]
        for group in [group for group in self._groups if group.broken]:
            self._groups.remove(group)
            group.release()
            self._groups += [Group([member]) for member in group.members]
        for group in self._groups:
            group.forget()
            group.refresh()

    def remove(self) -> None:
        """Leave every layer as it was."""
        self._handle.remove()
        for group in self._groups:
            group.release()
        self._groups = []


def _sharing(model: nn.Module, modules: Mapping[str, AdapterModule]) -> Iterable[list[LoRALinear]]:
    """Return the layers in sets that should read one input: by their roles and their parent."""
    roles = {place.path: place.roles for place in find_places(model)}
    sets: dict[tuple[str, str], list[LoRALinear]] = {}
    for path, module in modules.items():
        if type(module) is LoRALinear:
            context, _, kind = roles.get(path, ("",))[0].rpartition("_")
            shared = next((",".join(sorted(kinds)) for kinds in SHARING if kind in kinds), "")
            place = path.rpartition(".")[0] if shared else path
            sets.setdefault((place, f"{context} {shared}"), []).append(module)
    return sets.values()


def _fitting(layers: list[LoRALinear]) -> list[list[LoRALinear]]:
    """Return those layers that can be laid out, together as far as they are of one kind."""
    kinds: dict[Any, list[LoRALinear]] = {}
    for layer in layers:
        weight = frozen_weight(layer.base)
        if weight is not None and layer.start_A is None:
            kinds.setdefault((weight.dtype, weight.device, layer.in_features), []).append(layer)
    return list(kinds.values())
