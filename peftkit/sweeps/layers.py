"""One frozen layer with the adapters of several runs beside it: each run's rows get its own update.

The rows of a joint pass stand in the order of their runs, so that a run's rows are one piece of
the input. The frozen product is made once for all of them. LoRA's updates are made with it, those
of all layers that read one input at once (`JointGroup`); any other module then computes as it does
alone, on its own piece, and asks for the product with `AdapterModule.frozen`.

Shapes: M rows of the batch, T tokens of the longest, N tokens of a batch without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from peftkit.kernels.lora_update import Piece
from peftkit.methods.lora_groups import (
    LoRAGroup,
    SharedInputGroup,
    copy_masters,
    is_known,
    products_beside,
    sharing,
)
from peftkit.methods.lora_linear import LoRALinear
from peftkit.methods.protocol import AdapterModule
from peftkit.model.places import FrozenWrapper


class Part(NamedTuple):
    """A run's part of a joint batch: `num_rows` of M rows, or `num_tokens` of N tokens."""

    name: str
    num_rows: int
    num_tokens: int


@dataclass(slots=True)
class Routing:
    """Whose rows the model computes now; all layers of a sweep look at it.

    Attributes:
        pieces: In the order of the batch; one piece is all of any batch; none is the bare base.
    """

    pieces: tuple[Part, ...] = ()

    @contextmanager
    def to(self, *pieces: Part) -> Iterator[None]:
        """Route batches to these runs while the context holds."""
        before, self.pieces = self.pieces, pieces
        try:
            yield
        finally:
            self.pieces = before

    def alone(self, name: str) -> Any:
        """Route every batch to one run while the context holds."""
        return self.to(Part(name, 0, 0))

    def split(self, x: Tensor) -> tuple[list[int], int]:
        """Return the sizes of the pieces of a layer's input, and the dimension that they cut.

        What rounds a row's length is a piece of nobody's: values of it reach all documents, times
        zero, and one run's may not be finite.
        """
        rows = [piece.num_rows for piece in self.pieces]
        if x.shape[0] == sum(rows):
            return rows, 0
        tokens = [piece.num_tokens for piece in self.pieces]
        if x.dim() > 2 and x.shape[0] == 1 and x.shape[1] >= sum(tokens):
            return [*tokens, x.shape[1] - sum(tokens)], 1
        if x.dim() == 2 and x.shape[0] % sum(rows) == 0:  # (M * T, in)
            return [n * (x.shape[0] // sum(rows)) for n in rows], 0
        raise RuntimeError(f"a joint batch of {sum(rows)} rows reached a layer as {tuple(x.shape)}")


@dataclass(slots=True)
class _Product:
    """The frozen layer's output for a joint batch: made once, when the first run asks for it."""

    layer: SweepLinear
    x: Tensor
    sizes: list[int]
    dim: int
    pieces: Sequence[Tensor] = field(default=())

    def piece(self, number: int) -> Tensor:
        """Return one run's piece."""
        if not self.pieces:
            self.pieces = self.layer.product(self.x).split(self.sizes, self.dim)
        return self.pieces[number]


class JointGroup(SharedInputGroup):
    """Layers of one input with LoRA of several runs: all their products and updates at once.

    Attributes:
        groups: Run to its layers among these, and their places.
    """

    def __init__(self, layers: Sequence[SweepLinear], routing: Routing) -> None:
        super().__init__(layers)
        self.layers, self.routing = layers, routing
        self.groups: dict[str, tuple[tuple[int, ...], LoRAGroup]] = {}
        for name in dict.fromkeys(name for layer in layers for name in layer.members):
            found = {place: layer.members.get(name) for place, layer in enumerate(layers)}
            places = {n: m for n, m in found.items() if type(m) is LoRALinear}
            fitting = LoRAGroup.fitting(list(places.values()))
            if len(fitting) == 1 and len(fitting[0]) == len(places):
                self.groups[name] = tuple(places), LoRAGroup(fitting[0])
        for layer in layers:
            layer.group = self

    def takes(self, x: Tensor) -> bool:
        """Tell whether it computes the layers now, for such an input."""
        here = [self.groups[p.name][1] for p in self.routing.pieces if p.name in self.groups]
        return bool(here) and here[0].takes(x)

    def has(self, module: AdapterModule | None) -> bool:
        """Tell whether a module's update is one of those made here."""
        return isinstance(module, LoRALinear) and any(
            module.group is group for _, group in self.groups.values()
        )

    def compute(self, x: Tensor) -> Sequence[Tensor]:
        sizes, dim = self.routing.split(x)
        flat = x.reshape(-1, x.shape[-1])
        rows = [size * (len(flat) // x.shape[dim]) for size in sizes]
        pieces: list[tuple[Piece, LoRAGroup | None]] = []
        for part, count in zip(self.routing.pieces, rows, strict=False):
            places, group = self.groups.get(part.name, ((), None))
            ranks = () if group is None else group.ranks
            pieces.append((Piece(count, places, ranks), group))
        bases = [layer.base for layer in self.layers]
        outputs = products_beside(flat, self._dropped(flat, rows, pieces), bases, pieces)
        return [out.view(*x.shape[:-1], out.shape[-1]) for out in outputs]

    def _dropped(
        self,
        flat: Tensor,
        rows: Sequence[int],
        pieces: Sequence[tuple[Piece, LoRAGroup | None]],
    ) -> Tensor | None:
        """Return each run's rows after its own dropout; None where no run has any."""
        drops = [nn.Identity() if group is None else group.dropout for _, group in pieces]
        if all(isinstance(drop, nn.Identity) for drop in drops):
            return None
        parts = zip_longest(drops, flat.split(list(rows)), fillvalue=nn.Identity())
        return torch.cat([drop(cast(Tensor, part)) for drop, part in parts])


class SweepLinear(FrozenWrapper):
    """A frozen linear layer and the adapter modules of the runs that adapt it.

    Attributes:
        members: Run to its adapter module; no children: a run's tensors belong to its adapter.
        group: Computes it together with others that read its input, or None.
    """

    group: JointGroup | None = None

    def __init__(self, base: nn.Module, routing: Routing) -> None:
        self.members: dict[str, AdapterModule] = {}
        super().__init__(base)
        self.routing = routing

    @property
    def training(self) -> bool:
        """The mode, which is that of the runs' modules too: dropout looks at it."""
        return self._training

    @training.setter
    def training(self, mode: bool) -> None:
        self._training = mode
        for module in self.members.values():
            module.train(mode)

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        return (p for module in self.members.values() for p in module.trained_parameters())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pieces = self.routing.pieces
        here = [self.members.get(piece.name) for piece in pieces if self.enabled]
        if len(pieces) == 1 and here[0] is not None:
            return cast(Tensor, here[0](x, *args, **kwargs))
        if self.group is not None and self.group.takes(x):
            here = [None if self.group.has(module) else module for module in here]
        if not any(here):
            return self.product(x, *args, **kwargs)
        sizes, dim = self.routing.split(x)
        product = _Product(self, x, sizes, dim)
        parts = [
            product.piece(number) if module is None else _computed(module, product, number, part)
            for number, (module, part) in enumerate(
                zip_longest(here, cast("Sequence[Any]", x.split(sizes, dim)))
            )
        ]
        return torch.cat(parts, dim)

    def product(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the frozen layer gives for all rows, with the updates of its group."""
        if self.group is not None and len(self.routing.pieces) > 1 and self.group.takes(x):
            return self.group.part(self, x)
        return cast(Tensor, self.base(x, *args, **kwargs))


def _computed(module: AdapterModule, product: _Product, number: int, x: Tensor) -> Tensor:
    """Return what an adapter module gives for its piece, the frozen product being shared."""

    def frozen(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if given is x:
            return product.piece(number)
        return cast(Tensor, module.base(given, *args, **kwargs))  # IA3 scales what is read

    module.__dict__["frozen"] = frozen  # stands before the method while this piece is computed
    try:
        return cast(Tensor, module(x))
    finally:
        del module.__dict__["frozen"]


class Mounted:
    """The modules of several adapters beside the layers that they adapt.

    Args:
        model: The bare base.
        adapters: Run to its modules by path, whose `base` is the model's own layer.
    """

    def __init__(
        self, model: nn.Module, adapters: Mapping[str, Mapping[str, AdapterModule]]
    ) -> None:
        self.model, self.routing = model, Routing()
        self.layers: dict[str, SweepLinear] = {}
        self.groups: list[JointGroup] = []
        for name, modules in adapters.items():
            for path, module in modules.items():
                if path not in self.layers:
                    self.layers[path] = SweepLinear(module.base, self.routing)
                self.layers[path].members[name] = module
        self._sets = [
            [self.layers[path] for path in paths if is_known(self.layers[path].base)]
            for paths in sharing(model, self.layers)
        ]
        for path, layer in self.layers.items():
            model.set_submodule(path, layer)

    def lay_out(self) -> None:
        """Have layers of one input computed together, in the precision set by autocast."""
        self.groups = [JointGroup(layers, self.routing) for layers in self._sets if layers]

    def refresh(self, names: Iterable[str]) -> None:
        """Take over these runs' A and B as they are now, before a pass."""
        for joint in [joint for joint in self.groups if joint.is_broken]:
            self.groups.remove(joint)
            self.groups += [JointGroup([layer], self.routing) for layer in joint.layers]
        for joint in self.groups:
            joint.forget()
        for name in names:  # one by one: their copies are made at once, in float32
            copy_masters([own[1] for g in self.groups if (own := g.groups.get(name)) is not None])

    def remove(self) -> None:
        """Leave model and modules as they were."""
        for joint in self.groups:
            for _, group in joint.groups.values():
                group.release()
        for path, layer in self.layers.items():
            self.model.set_submodule(path, layer.base)
