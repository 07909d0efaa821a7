"""The mode of a model: training or evaluation, with or without its wrappers, compiled or not.

Shapes: r rank; in, out features of a layer; n hidden states of size H.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from peftkit.model.places import FrozenWrapper


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def begin_training(model: nn.Module) -> None:
    """Set a model to training mode, except frozen batch norms.

    Adapter files do not hold running statistics, so the base's statistics stay in use.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(any(parameter.requires_grad for parameter in module.parameters()))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode without gradients within the context."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of a model within the context."""
    modules = [module for module in model.modules() if isinstance(module, FrozenWrapper)]
    before = [module.enabled for module in modules]
    try:
        for module in modules:
            module.enabled = False
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.enabled = enabled


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run a model's compiled modules eagerly within the context."""
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


Wrapped = list[tuple[nn.Module, str, FrozenWrapper]]
"""Parent, name in the parent, and wrapper; the outer ones first."""


def take_off(model: nn.Module) -> Wrapped:
    """Replace all wrappers (adapter modules, a bank's layers) by their frozen modules.

    Adapters that act through hooks, such as prompts, stay active.
    """
    removed: Wrapped = []
    while wrappers := list(_outermost(model)):
        for parent, name, wrapper in wrappers:
            setattr(parent, name, wrapper.base)
        removed += wrappers
    return removed


@contextmanager
def lifted(model: nn.Module) -> Iterator[None]:
    """Remove a model's wrappers within the context, which may install others."""
    removed = take_off(model)
    try:
        yield
    finally:
        take_off(model)
        for parent, name, wrapper in reversed(removed):
            setattr(parent, name, wrapper)


def _outermost(module: nn.Module) -> Iterator[tuple[nn.Module, str, FrozenWrapper]]:
    """Yield the outermost wrappers; a shared module is yielded at each of its places."""
    visited, waiting = {module}, [module]
    while waiting:
        parent = waiting.pop()
        for name, child in parent.named_children():
            if isinstance(child, FrozenWrapper):
                yield parent, name, child
            elif child not in visited:
                visited.add(child)
                waiting.append(child)


@dataclass(frozen=True, slots=True)
class SideAdapter:
    """A second, frozen LoRA on the same base, for example a reward model's.

    Attributes:
        updates: Module path to A (r, in) and the scaled B (out, r).
        head: Tensors of the value head, by the last segment of their name.
        task: The section `task` of its recipe.
        style: Its prompt format.
        key: Hash of its tensors.
    """

    updates: Mapping[str, tuple[Tensor, Tensor]]
    head: Mapping[str, Tensor]
    task: Mapping[str, Any]
    style: Any
    key: str

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Use this adapter instead of the attached one within the context."""
        first = next(model.parameters())
        hooks = []
        try:
            for path, (a, b) in self.updates.items():
                pair = a.to(first.device), b.to(first.device)
                hooks.append(model.get_submodule(path).register_forward_hook(_added(*pair)))
            with adapters_off(model):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def values(self, hidden: Tensor) -> Tensor:
        """Return the values (n,) of hidden states (n, H), in fp32."""
        bias = self.head.get("bias")
        weight = self.head["weight"].to(hidden.device, hidden.dtype)
        bias = None if bias is None else bias.to(hidden.device, hidden.dtype)
        return linear(hidden, weight, bias)[:, 0].float()


def _added(a: Tensor, b: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        x = args[0]
        return out + linear(linear(x, a.to(x.dtype)), b.to(x.dtype))

    return hook
