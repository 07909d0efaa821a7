"""Quantisation-aware training (`train.quantize_for`): when it begins, and which layers it needs.

From step `quantize_from` times the number of steps, adapted layers compute with the weights that
the merged file will have (forward/fake_quantized.py), in training and evaluation. This is a
function of A, B and W: a resumed run continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from peftkit.errors import ConfigError
from peftkit.events import Notice
from peftkit.forward.fake_quantized import FakeQuantized
from peftkit.model.blocks import is_sharded, is_streamed
from peftkit.settings import TrainConfig
from peftkit.tasks.run_hooks import Run
from peftkit.train.step import Step


@contextmanager
def quantization_aware(run: Run, step: Step) -> Iterator[Callable[[int], None]]:
    """Yield a function that begins the quantisation if it is due in a step, counted from 0.

    Raises:
        ConfigError: The model or the settings do not support it.
    """
    kind = run.config.quantize_for
    layers = _layers(run.model, run.config)
    step.use(replace(step.plan, compile=False))  # the weights are cached between calls
    start = math.ceil(run.config.quantize_from * run.num_steps)
    has_begun = False

    def before(number: int) -> None:
        nonlocal has_begun
        if has_begun or number < start:
            return
        has_begun = True
        for layer in layers:
            layer.quantized = FakeQuantized(kind)
        if run.state.step == start:  # not a resumed run
            state = run.state
            state.best_step = state.best_loss = state.best_score = state.patience_loss = None
            state.worse_evals = 0
            run.say(
                Notice(
                    f"From step {start + 1} on, {len(layers)} layers compute with weights "
                    f"quantised to {kind}. Losses and evaluations are those of the quantised "
                    "model; the best evaluation is counted from here."
                )
            )

    def forget(*_: object) -> None:
        for layer in layers:
            if layer.quantized is not None:
                layer.quantized.forget()

    # fused optimizers do not change the tensors' versions
    handle = step.optimizer.register_step_post_hook(forget)
    try:
        yield before
    finally:
        handle.remove()
        for layer in layers:
            layer.quantized = None


def _layers(model: nn.Module, config: TrainConfig) -> list[Any]:
    """Return the LoRA layers; raise ConfigError if a setting or another module forbids it."""
    kind = config.quantize_for
    setting = f"train.quantize_for: {kind} is not possible here."
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "merged_weight") and m.enabled]
    # DoRA's layers cannot be grouped either: their norms depend on the weight
    layers = [module for module in modules if getattr(module, "can_group", False)]
    if not layers or len(layers) < len(modules):
        kinds = sorted({type(m).__name__ for m in modules if m not in layers})
        raise ConfigError(
            setting,
            found=f"Modules of the adapter: {', '.join(kinds) or 'none'}.",
            fix="Use method.type: lora on linear layers only.",
        )
    reason = ""
    if any(
        layer.initial_A is not None or isinstance(layer.dropout, nn.Dropout) for layer in layers
    ):
        reason = "The method subtracts initial values, or has dropout."
    elif kind != "int4_128" and any(layer.in_features % 32 for layer in layers):
        reason = "The rows of a layer are not a multiple of 32 values."
    elif is_sharded(model) or is_streamed(model):
        reason = "The base is sharded or streamed: its weights are not on the device."
    elif config.compile is True:
        reason = "train.compile is true."
    if reason:
        raise ConfigError(setting, found=reason, fix="Change that setting, or remove quantize_for.")
    return layers
