"""The mode of a model: training or evaluation, with or without its adapters, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

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
