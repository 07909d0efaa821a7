"""The mode that a model is in: training or not, adapters off, and what is laid out for it.

A method may compute several layers together while they are trained. It says so on the modules
(`training_layout`); training finds it there and knows nothing more of methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from peftkit.execution.plan import ExecutionPlan
from peftkit.model.fused import fused_modules
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
    """Put a model into training mode; frozen batch norms keep the statistics of the base.

    What a running mean would become is in no adapter.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(any(parameter.requires_grad for parameter in module.parameters()))


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


def training_layouts(model: nn.Module) -> list[Any]:
    """Return the layouts of a model's layers, each once: how a method computes several together."""
    found = [getattr(module, "training_layout", None) for module in model.modules()]
    return list({id(layout): layout for layout in found if layout is not None}.values())


@contextmanager
def prepared_for_training(model: nn.Module, plan: ExecutionPlan) -> Iterator[None]:
    """Have a model's layers laid out as the plan says within the context."""
    layouts = training_layouts(model) if plan.lora_grouped else []
    try:
        for layout in layouts:
            layout.prepare()
        with fused_modules(model) if plan.fused_kernels else nullcontext():
            yield
    finally:
        for layout in layouts:
            layout.end()


@contextmanager
def prepared_for_serving(model: nn.Module, plan: ExecutionPlan) -> Iterator[None]:
    """Have a model's layers ready for token after token within the context."""
    with ExitStack() as stack:
        for layout in training_layouts(model):
            stack.enter_context(layout.serving())
        if plan.fused_kernels:
            stack.enter_context(fused_modules(model))
        yield


def refresh_layouts(model: nn.Module) -> None:
    """Let layouts take over tensors that were changed in a way that torch does not tell of."""
    for layout in training_layouts(model):
        layout.refresh()
