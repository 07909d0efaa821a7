"""The mode that a model is in: training or evaluation, adapters on or off."""

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


def begin_training(model: nn.Module) -> None:
    """Put a model into training mode, except frozen batch norms.

    Adapter files do not hold running statistics, so the base's stay in use.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(any(parameter.requires_grad for parameter in module.parameters()))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in eval mode and without gradients within the context."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of a model within the context."""
    modules = [module for module in model.modules() if unwrap_adapter(module) is not module]
    before = [module.enabled for module in modules]
    try:
        for module in modules:
            module.enabled = False  # type: ignore[assignment]
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.enabled = enabled
