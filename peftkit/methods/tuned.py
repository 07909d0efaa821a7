"""Modules that are trained themselves: copies of some of their parameters are, the base stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.errors import TargetError, did_you_mean
from peftkit.methods.protocol import AdapterModule
from peftkit.targets import Site


class TunedModule(AdapterModule):
    """A frozen module that computes with trained copies of some of its own parameters.

    Args:
        names: Which parameters, "weight" or "dense.weight".
        prefix: What PEFT's files have before these names.

    Attributes:
        trained: The copies, in the order of `names`.
    """

    def __init__(
        self,
        base: nn.Module,
        site: Site,
        *,
        names: Sequence[str],
        dtype: torch.dtype,
        prefix: str = "",
    ) -> None:
        super().__init__(base, site)
        self.names, self.prefix = tuple(names), prefix
        self.trained = nn.ParameterList(
            nn.Parameter(base.get_parameter(name).detach().to(dtype, copy=True)) for name in names
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled:
            return self.base(*args, **kwargs)
        used = {
            name: trained.to(self.base.get_parameter(name).dtype)
            for name, trained in zip(self.names, self.trained, strict=True)
        }
        return torch.func.functional_call(self.base, used, args, kwargs)

    def reset(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            for name, trained in zip(self.names, self.trained, strict=True):
                trained.copy_(self.base.get_parameter(name))

    def state(self) -> dict[str, Tensor]:
        pairs = zip(self.names, self.trained, strict=True)
        return {self.prefix + name: trained.detach() for name, trained in pairs}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.state().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, trained in zip(self.names, self.trained, strict=True):
            trained.copy_(state[self.prefix + name])

    @property
    def changed(self) -> tuple[str, ...]:
        return self.names

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        return {name: base.get_parameter(name) for name in self.names}

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        return self.trained[self.names.index(name)].detach().to(weight.device, torch.float32)


def whole(base: nn.Module, path: str, dtype: torch.dtype) -> TunedModule:
    """Return a module that is trained as a whole.

    Raises:
        TargetError: It has nothing that can be trained: no parameters, or quantised ones.
    """
    parameters = dict(base.named_parameters())
    packed = [name for name, p in parameters.items() if not p.is_floating_point()]
    if packed or not parameters:
        raise TargetError(
            f"cannot train the whole of {path}",
            found=f"{packed[0]} is quantised" if packed else "it has no parameters",
            fix="Name modules that are kept in 16 bits: heads, norms, embeddings.",
        )
    return TunedModule(base, Site(path=path, roles=()), names=tuple(parameters), dtype=dtype)


def named_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the paths of the modules that `names` mean: whole paths, or their dotted ends.

    Raises:
        TargetError: A name means nothing in this model.
    """
    paths = [path for path, _ in model.named_modules() if path]
    found = {name: [p for p in paths if f".{p}".endswith(f".{name}")] for name in names}
    missing = [name for name, hits in found.items() if not hits]
    if missing:
        leaves = sorted({path.rpartition(".")[2] for path in paths})
        raise TargetError(
            f"no module is called {', '.join(map(repr, missing))} in {type(model).__name__}.",
            found=did_you_mean(missing[0], leaves),
            fix="Name modules as peftkit inspect MODEL lists them.",
        )
    chosen = {path for hits in found.values() for path in hits}
    inner = {p for p in chosen if any(p.startswith(f"{other}.") for other in chosen)}
    return [path for path in paths if path in chosen - inner]
