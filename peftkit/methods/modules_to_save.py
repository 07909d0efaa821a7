"""Modules that are trained in full, such as heads: copies of their parameters are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftkit.errors import TargetError, did_you_mean
from peftkit.methods.protocol import AdapterModule
from peftkit.model.targets import Site


class TunedModule(AdapterModule):
    """A frozen module that computes with trained copies of some of its own parameters.

    Other attributes are those of the base: a head is used through its parts.

    Args:
        names: Parameters of the base itself, not of its submodules.
        prefix: Prefix of these names in PEFT's files.
        made: Existing copies by the id of the original, for tied parameters; new ones are added.

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
        made: dict[int, nn.Parameter] | None = None,
    ) -> None:
        super().__init__(base, site)
        self.names, self.prefix = tuple(names), prefix
        self.trained = nn.ParameterList()
        made = {} if made is None else made
        for own in (base.get_parameter(name) for name in names):
            if id(own) not in made:
                exact = torch.promote_types(dtype, own.dtype)  # fewer bits would change the base
                made[id(own)] = nn.Parameter(own.detach().to(exact, copy=True))
            self.trained.append(made[id(own)])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["base"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled:
            return self.base(*args, **kwargs)
        used = {
            name: trained.to(self.base.get_parameter(name).dtype) for name, trained in self._pairs()
        }
        return torch.func.functional_call(self.base, used, args, kwargs)

    @property
    def weight(self) -> Tensor:
        """The weight in use, for models that read it and never call the module."""
        return self._used("weight")

    @property
    def bias(self) -> Tensor | None:
        """The bias, likewise."""
        return self._used("bias")

    def _used(self, name: str) -> Any:
        own = getattr(self.base, name)
        if not self.enabled or name not in self.names:
            return own
        return self.trained[self.names.index(name)].to(own.dtype)

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, cast("Iterator[Tensor]", self.trained), strict=True)

    def reset(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            for name, trained in self._pairs():
                trained.copy_(self.base.get_parameter(name))

    def state(self) -> dict[str, Tensor]:
        return {self.prefix + name: trained.detach() for name, trained in self._pairs()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, trained in self._pairs():
            trained.copy_(state[self.prefix + name])

    @property
    def changed(self) -> tuple[str, ...]:
        return self.names

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        return {name: base.get_parameter(name) for name in self.names}

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        return self.trained[self.names.index(name)].detach().to(weight.device, torch.float32)


def wrap_fully(model: nn.Module, path: str, dtype: torch.dtype) -> dict[str, AdapterModule]:
    """Return wrappers that train a module with all its submodules, the innermost first.

    Submodules keep their paths, and gradient checkpointing may recompute them.

    Raises:
        TargetError: It has nothing that can be trained: no parameters, or quantised ones.
    """
    module = model.get_submodule(path)
    packed = [name for name, p in module.named_parameters() if not p.is_floating_point()]
    if packed or not any(True for _ in module.parameters()):
        raise TargetError(
            f"cannot train {path} in full",
            found=f"{packed[0]} is quantised" if packed else "it has no parameters",
            fix="Name modules that are kept in 16 bits: heads, norms, embeddings.",
        )
    made: dict[int, nn.Parameter] = {}
    tuned: dict[str, AdapterModule] = {}
    for name, part in reversed(list(module.named_modules(prefix=path, remove_duplicate=False))):
        own = [n for n, p in part._parameters.items() if p is not None]
        if own:
            site = Site(path=name, roles=())
            tuned[name] = TunedModule(part, site, names=own, dtype=dtype, made=made)
    return tuned


def named_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the paths of the modules that `names` match: whole paths, or their dotted ends.

    Raises:
        TargetError: A name matches nothing in this model.
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
