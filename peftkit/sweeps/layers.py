"""One frozen layer with the adapters of several runs beside it: each run's rows get its own update.

The rows of a joint pass stand in the order of their runs, so that a run's rows are one piece of
the input. The frozen product is made once for all of them; each adapter module then computes as it
does alone, on its own piece, and asks for the product with `AdapterModule.frozen`.

Shapes: M rows of the batch, T tokens of the longest, N tokens of a batch without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from peftkit.methods.protocol import AdapterModule


class Piece(NamedTuple):
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

    pieces: tuple[Piece, ...] = ()

    @contextmanager
    def to(self, *pieces: Piece) -> Iterator[None]:
        """Route batches to these runs while the context holds."""
        before, self.pieces = self.pieces, pieces
        try:
            yield
        finally:
            self.pieces = before

    def alone(self, name: str) -> Any:
        """Route every batch to one run while the context holds."""
        return self.to(Piece(name, 0, 0))

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

    base: nn.Module
    x: Tensor
    sizes: list[int]
    dim: int
    pieces: Sequence[Tensor] = field(default=())

    def piece(self, number: int) -> Tensor:
        """Return one run's piece."""
        if not self.pieces:
            out = cast(Tensor, self.base(self.x))
            self.pieces = out.split(self.sizes, self.dim)
        return self.pieces[number]


class SweepLinear(nn.Module):
    """A frozen linear layer and the adapter modules of the runs that adapt it.

    Attributes:
        base: The frozen layer.
        members: Run to its adapter module; no children: a run's tensors belong to its adapter.
    """

    def __init__(self, base: nn.Module, routing: Routing) -> None:
        super().__init__()
        self.base, self.routing = base, routing
        self.members: dict[str, AdapterModule] = {}

    @property
    def weight(self) -> Tensor:
        """The base's weight, for models that look at it."""
        return cast(Tensor, self.base.weight)

    @property
    def bias(self) -> Tensor | None:
        """The base's bias, likewise."""
        return cast("Tensor | None", self.base.bias)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pieces = self.routing.pieces
        here = [self.members.get(piece.name) for piece in pieces]
        if not any(here):
            return cast(Tensor, self.base(x, *args, **kwargs))
        if len(pieces) == 1:
            return cast(Tensor, cast(AdapterModule, here[0])(x, *args, **kwargs))
        sizes, dim = self.routing.split(x)
        product = _Product(self.base, x, sizes, dim)
        parts = [
            product.piece(number) if module is None else _computed(module, product, number, part)
            for number, (module, part) in enumerate(
                zip_longest(here, cast("Sequence[Any]", x.split(sizes, dim)))
            )
        ]
        return torch.cat(parts, dim)

    def train(self, mode: bool = True) -> SweepLinear:
        """Set the mode of the runs' modules too: dropout looks at it."""
        super().train(mode)
        for module in self.members.values():
            module.train(mode)
        return self


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


def mount(
    model: nn.Module, adapters: Mapping[str, Mapping[str, AdapterModule]]
) -> tuple[Routing, Any]:
    """Put the modules of several adapters beside the layers that they adapt.

    Args:
        model: The bare base.
        adapters: Run to its modules by path, whose `base` is the model's own layer.

    Returns:
        The routing, and a function that takes all of it away again.
    """
    routing, layers = Routing(), dict[str, SweepLinear]()
    for name, modules in adapters.items():
        for path, module in modules.items():
            if path not in layers:
                layers[path] = SweepLinear(module.base, routing)
            layers[path].members[name] = module
    for path, layer in layers.items():
        model.set_submodule(path, layer)
    return routing, partial(_unmount, model, layers)


def _unmount(model: nn.Module, layers: Mapping[str, SweepLinear]) -> None:
    for path, layer in layers.items():
        model.set_submodule(path, layer.base)
