"""Train or eval mode of a model's modules within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from peftkit.model.places import unwrap_adapter


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the train or eval mode of every module on leaving."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, without gradients."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Have a model compute as if it carried no adapter."""
    modules = [module for module in model.modules() if unwrap_adapter(module) is not module]
    before = [module.enabled for module in modules]
    try:
        for module in modules:
            module.enabled = False  # type: ignore[assignment]
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.enabled = enabled
