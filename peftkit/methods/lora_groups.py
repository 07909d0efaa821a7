"""LoRA layers of one input, computed together: their updates by one product with A.

`Grouping.prepare` lays the groups out, `end` takes them down; in between their copies of A and B
follow the adapter's own tensors: after each step of any optimizer, and whenever a tensor's version
says that it has changed. A model that nobody prepared computes each layer on its own. The base
stays where it is, packed or not.

The first layer of a group that is called computes all of it and the others find their part. That
they are called with the same input is known by the tensor itself: a group whose layers get others
is broken up, and each computes on its own, as do layers that cannot be in a group.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from peftkit.kernels.lora_update import Layer, Piece, beside
from peftkit.methods.lora_linear import LoRALinear
from peftkit.methods.protocol import AdapterModule
from peftkit.model.places import find_places
from peftkit.quant.layers import QuantizedLinear, frozen_weight

SHARING = ({"q", "k", "v"}, {"gate", "up"})
"""Last parts of roles whose layers, side by side in one module, read the same input."""
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


class LoRAGroup(SharedInputGroup):
    """LoRA layers of one input.

    Args:
        serves: For generation: A and B are not cast for each token. Else for training, where a
            rounding more is none.

    Attributes:
        members: The layers.
        ranks: Columns of each one's A.
        lora_a: (R, in): s A of all, in the dtype that the base computes in. lora_b: B of each.
        scales: (R,): s of each row of A.
    """

    def __init__(self, members: Sequence[LoRALinear], *, serves: bool = False) -> None:
        super().__init__(members)
        self.serves = serves
        self.members, self.dropout = list(members), members[0].dropout
        self.ranks = tuple(member.lora_A.shape[0] for member in members)
        device, autocast = members[0].lora_A.device, _autocast(members[0].lora_A)
        self.dtype = autocast or _dtype_of(members[0].base)
        how: Any = {"dtype": self.dtype, "device": device}
        self.lora_a = torch.zeros(sum(self.ranks), members[0].in_features, **how)
        self.lora_b = [
            torch.zeros(member.out_features, rank, **how)
            for member, rank in zip(members, self.ranks, strict=True)
        ]
        self.copies = [*self.lora_a.split(self.ranks), *self.lora_b]
        own = [member.scaling for member in members]
        each = [scale for scale, rank in zip(own, self.ranks, strict=True) for _ in range(rank)]
        self.scales = torch.tensor(each, device=device)
        self.factors = [*own, *[1.0] * len(own)]
        self.seen: list[int] = []
        for member in members:
            member.group = self

    @classmethod
    def fitting(cls, layers: Sequence[LoRALinear]) -> list[list[LoRALinear]]:
        """Return those layers that can be computed like this, as far as they are of one kind."""
        kinds: dict[Any, list[LoRALinear]] = {}
        for layer in layers:
            if is_known(layer.base) and layer.initial_A is None:
                kind = _dtype_of(layer.base), layer.lora_A.device, layer.in_features
                kinds.setdefault(kind, []).append(layer)
        return list(kinds.values())

    def takes(self, x: Tensor) -> bool:
        """Tell whether to compute together, for such an input."""
        trains, autocast = self.members[0].training, _autocast(x)
        if trains == self.serves or torch.is_grad_enabled() == self.serves:
            return False
        if self.serves and autocast is not None:
            return False
        return (autocast or x.dtype) == self.dtype and x.device == self.lora_a.device

    def output(self, layer: LoRALinear, x: Tensor) -> Tensor:
        """Return what a layer gives for x."""
        if not torch.compiler.is_compiling() and self.seen != self.versions():
            copy_masters([self])
        return self.part(layer, x)

    def compute(self, x: Tensor) -> Sequence[Tensor]:
        flat, bases = x.reshape(-1, x.shape[-1]), [member.base for member in self.members]
        outputs: Sequence[Tensor]
        if self.serves:
            parts = functional.linear(flat, self.lora_a).split(self.ranks, 1)
            each = zip(bases, parts, self.lora_b, strict=True)
            outputs = [torch.addmm(base(flat), part, b.t()) for base, part, b in each]
        else:
            dropped = None if isinstance(self.dropout, nn.Identity) else self.dropout(flat)
            piece = Piece(None, tuple(range(len(self.ranks))), self.ranks)
            outputs = products_beside(flat, dropped, bases, [(piece, self)])
        return [out.view(*x.shape[:-1], out.shape[-1]) for out in outputs]

    def versions(self) -> list[int]:
        """Return how often each A and B was changed; `seen` are those of the copies."""
        return [tensor._version for m in self.members for tensor in (m.lora_A, m.lora_B)]

    def masters(self) -> list[Tensor]:
        """Return what gradients go to: A of each member, then B of each."""
        return [m.lora_A for m in self.members] + [m.full_b() for m in self.members]

    def release(self) -> None:
        for member in self.members:
            member.group = None


@torch.no_grad()
def copy_masters(groups: Sequence[LoRAGroup]) -> None:
    """Let groups take over A and B as they are now: a handful of kernels for all of them.

    No trace is left in the versions of the copies, so that two passes may come before one backward.
    """
    if not groups:
        return
    factors = [factor for group in groups for factor in group.factors]
    sources: list[Tensor] = []
    for group in groups:
        sources += [member.full_a().detach() for member in group.members]
        sources += [member.full_b().detach() for member in group.members]
    sources = list(torch._foreach_mul(sources, factors))
    torch._foreach_copy_([copy.data for group in groups for copy in group.copies], sources)
    for group in groups:
        group.seen = group.versions()
        group.forget()


def products_beside(
    x: Tensor,
    dropped: Tensor | None,
    bases: Sequence[nn.Module],
    pieces: Sequence[tuple[Piece, LoRAGroup | None]],
) -> tuple[Tensor, ...]:
    """Return what each base gives for x (M, in), with the updates of each piece's group.

    Args:
        dropped: What A reads (M, in), where dropout makes it another than x.
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


class Grouping:
    """The groups of an adapter, from `prepare` to `end`."""

    def __init__(self, model: nn.Module, modules: Mapping[str, AdapterModule]) -> None:
        own = {path: module for path, module in modules.items() if type(module) is LoRALinear}
        self._sets = [[own[path] for path in paths] for paths in sharing(model, own)]
        self._groups: list[LoRAGroup] = []
        self._hook: RemovableHandle | None = None
        for layer in self._layers():
            layer.training_layout = self

    def _layers(self) -> list[LoRALinear]:
        return [layer for layers in self._sets for layer in layers]

    def prepare(self) -> None:
        """Lay the groups out."""
        self.end()
        for found in self._sets:
            self._groups += [LoRAGroup(members) for members in LoRAGroup.fitting(found)]
        this = weakref.ref(self)

        def record_step(*_: Any) -> None:  # fused optimizers leave no trace in a tensor's version
            if (grouping := this()) is not None:
                grouping.refresh()

        self._hook = register_optimizer_step_post_hook(record_step)
        self.refresh()

    def refresh(self) -> None:
        """Take over all A and B as they are now, and break up what does not read one input."""
        for group in [group for group in self._groups if group.is_broken]:
            self._groups.remove(group)
            group.release()
            self._groups += [LoRAGroup([member]) for member in group.members]
        copy_masters(self._groups)

    def end(self) -> None:
        """Let every layer compute by itself again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for group in self._groups:
            group.release()
        self._groups = []

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Have A and B ready for token after token; then layers are as they were."""
        before = [(layer, layer.group) for layer in self._layers()]
        groups = [
            LoRAGroup(members, serves=True)
            for found in self._sets
            for members in LoRAGroup.fitting(found)
        ]
        copy_masters(groups)
        try:
            yield
        finally:
            for layer, group in before:
                layer.group = group

    def remove(self) -> None:
        """Leave every layer as it was before there was an adapter."""
        self.end()
        for layer in self._layers():
            layer.training_layout = None


def sharing(model: nn.Module, paths: Iterable[str]) -> list[list[str]]:
    """Return the paths of layers in sets that should read one input: by role and parent."""
    roles = {place.path: place.roles for place in find_places(model)}
    sets: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        context, _, kind = roles.get(path, ("",))[0].rpartition("_")
        shared = next((",".join(sorted(kinds)) for kinds in SHARING if kind in kinds), "")
        place = path.rpartition(".")[0] if shared else path
        sets.setdefault((place, f"{context} {shared}"), []).append(path)
    return list(sets.values())


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


def _autocast(x: Tensor) -> torch.dtype | None:
    """Return what autocast is set to where x is; None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
