"""Put a method's modules on a model: freeze, wrap, list, disable, detach."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from peftkit.anatomy import bare
from peftkit.errors import AdapterError
from peftkit.methods.protocol import ADAPTER_DTYPES, AdapterModule, Method
from peftkit.methods.tuned import named_modules, whole
from peftkit.targets import Site


class Adapter:
    """A method's modules, in place on a frozen model.

    Attributes:
        model: The model, changed in place.
        method: The config that it came from.
        modules: Module path to adapter module, in the order of the model; then those of `full`.
        full: Paths of the modules that are trained whole, beside the method's own.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        modules: dict[str, AdapterModule],
        full: Collection[str] = (),
    ) -> None:
        self.model, self.method, self.modules = model, method, modules
        self.full = frozenset(full)
        self._handles = method.connect(model, self.own)

    @property
    def own(self) -> dict[str, AdapterModule]:
        """The modules that are the method's."""
        return {path: module for path, module in self.modules.items() if path not in self.full}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters."""
        return (
            p for module in self.modules.values() for p in module.parameters() if p.requires_grad
        )

    @property
    def num_trainable(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.parameters())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the bare base while the context holds."""
        before = {path: module.enabled for path, module in self.modules.items()}
        try:
            for module in self.modules.values():
                module.enabled = False
            yield
        finally:
            for path, module in self.modules.items():
                module.enabled = before[path]

    def detach(self) -> None:
        """Take every adapter module out again; the model is the bare, frozen base."""
        for handle in self._handles:
            handle.remove()
        for path, module in self.modules.items():
            _replace(self.model, path, module.base)
        self.modules, self._handles = {}, []

    def state(self) -> dict[str, Tensor]:
        """Return what is saved: "module.path.tensor_name", or a shared name, to tensor."""
        return self.method.shared(self.own) | {
            f"{path}.{name}": tensor
            for path, module in self.modules.items()
            for name, tensor in module.state().items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the tensors of `state()`, all or none.

        Raises:
            AdapterError: Lists every missing, unexpected and misshapen tensor.
        """
        shared = self.method.shared(self.own)
        expected = {name: tuple(tensor.shape) for name, tensor in shared.items()} | {
            f"{path}.{name}": shape
            for path, module in self.modules.items()
            for name, shape in module.state_shapes().items()
        }
        problems = [f"missing: {name} {expected[name]}" for name in expected.keys() - state.keys()]
        problems += [f"unexpected: {name}" for name in state.keys() - expected.keys()]
        problems += [
            f"misshapen: {name} is {tuple(state[name].shape)}, not {expected[name]}"
            for name in expected.keys() & state.keys()
            if tuple(state[name].shape) != expected[name]
        ]
        if problems or not expected:
            raise AdapterError(
                f"the adapter does not fit {type(self.model).__name__}",
                found="\n".join(sorted(problems)) or "it has no tensors at all",
                fix="Use the base it was trained on: peftkit inspect ADAPTER",
            )
        with torch.no_grad():
            for name, tensor in shared.items():
                tensor.copy_(state[name])
        for path, module in self.modules.items():
            module.load({name: state[f"{path}.{name}"] for name in module.state_shapes()})


def attach(
    model: nn.Module, method: Method, *, sites: list[Site] | None = None, seed: int = 0
) -> Adapter:
    """Freeze a model and put a method's modules on it; its output is unchanged by that.

    Args:
        model: Any transformer; changed in place.
        method: What to attach; `method.targets` say where.
        sites: Where, when the caller already knows.
        seed: Of the initial values; the same on every device.

    Raises:
        TargetError: A target is not in this model, or does not suit the method.
        AdapterError: The model carries an adapter already.
    """
    if any(bare(module) is not module for module in model.modules()):  # a bank's layers too
        raise AdapterError(
            f"{type(model).__name__} carries an adapter already",
            fix="Call its detach() first, or merge it.",
        )
    full = {
        path: whole(model.get_submodule(path), path, ADAPTER_DTYPES[method.dtype])
        for path in named_modules(model, method.train_fully)
    }
    grouped: dict[str, list[Site]] = {}
    for site in method.sites(model) if sites is None else sites:
        if not any(f"{site.path}.".startswith(f"{path}.") for path in full):
            grouped.setdefault(site.path, []).append(site)
    modules = {
        path: _wrapped(method, model.get_submodule(path), found) for path, found in grouped.items()
    }
    method.share(modules)
    modules |= full
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for path, module in modules.items():
        module.base.requires_grad_(False)
        module.reset(generator)
        module.train(model.training)
        _replace(model, path, module)
    return Adapter(model, method, modules, full)


def _wrapped(method: Method, base: nn.Module, sites: list[Site]) -> AdapterModule:
    if sites[0].parameter is None:
        return method.wrap(base, sites[0])
    return method.wrap_experts(base, sites)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
