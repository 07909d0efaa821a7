"""The check of grouped LoRA layers: they must compute what the layers compute alone.

Before training, one group of each kind computes its outputs and gradients for random tokens, with
random numbers for A and B (with B = 0, no error in an update would show) and without dropout. They
may differ from single layers by the last rounding to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.forward.noise import is_last_rounding
from peftkit.model.blocks import STREAMED, recomputable_blocks

NUM_TOKENS = 8


def separate_wrong(model: nn.Module, groups: Iterable[Any]) -> str:
    """Undo the groups of a kind that differs from single layers; return what differs, or ""."""
    stream: Any = getattr(model, STREAMED, None)
    blocks = recomputable_blocks(model) if stream is not None else []
    problems: dict[Any, str] = {}
    for group in filter(None, groups):
        if (kind := group.kind) not in problems:
            inside = (block for block in blocks if group.layers[0] in set(block.modules()))
            block = next(inside, None)
            with nullcontext() if block is None else stream.around(block):
                problems[kind] = _problem_of(group)
        if problems[kind]:
            for layer in group.layers:
                layer.group = None
    return next(filter(None, problems.values()), "")


def _problem_of(group: Any) -> str:
    layers, generator = group.layers, torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(group.lora_a.device)

    trained = [p for layer in layers for p in (layer.lora_A, layer.lora_B)]
    weights = [drawn(NUM_TOKENS, layer.out_features) for layer in layers]
    x = group.input_like(drawn(NUM_TOKENS, layers[0].in_features))
    with _kept(group, trained):
        with torch.no_grad():
            for parameter in trained:
                parameter.copy_(drawn(*parameter.shape) * parameter.shape[1] ** -0.5)
        x.requires_grad_()
        both = (_figures(group, x, trained, weights, alone=alone) for alone in (False, True))
        names = [*(f"output {n}" for n in range(len(layers))), "the gradient of the input"]
        names += [f"the gradient of {name} {n}" for n in range(len(layers)) for name in "AB"]
        for name, together, alone in zip(names, *both, strict=True):
            if not is_last_rounding(together.float(), alone.float(), group.dtype):
                return f"{name} of {len(layers)} grouped layers differs from single layers."
    return ""


def _figures(
    group: Any, x: Tensor, trained: Sequence[Tensor], weights: Sequence[Tensor], *, alone: bool
) -> list[Tensor]:
    """Return the outputs of all layers, and the gradients of their weighted sum."""
    with torch.enable_grad():
        for layer in group.layers:
            layer.group = None if alone else group
        outputs = [layer(x) for layer in group.layers]
        total = sum((out.float() * w).sum() for out, w in zip(outputs, weights, strict=True))
        return [*outputs, *torch.autograd.grad(total, [x, *trained])]


@contextmanager
def _kept(group: Any, trained: Sequence[Tensor]) -> Iterator[None]:
    """Restore A, B, dropout and the group of the layers after the context."""
    before = [parameter.detach().clone() for parameter in trained]
    drops = [layer.dropout for layer in group.layers if isinstance(layer.dropout, nn.Dropout)]
    rates = [drop.p for drop in drops]
    try:
        for drop in drops:
            drop.p = 0.0
        yield
    finally:
        for drop, rate in zip(drops, rates, strict=True):
            drop.p = rate
        for layer in group.layers:
            layer.group = group
        with torch.no_grad():
            for parameter, values in zip(trained, before, strict=True):
                parameter.copy_(values)
        group.refresh()
