"""The optimizer: AdamW in four forms, its learning rates, gradients and state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from peftkit.errors import CheckpointError, ConfigError, first_few
from peftkit.settings import TrainConfig

BETAS = (0.9, 0.999)
EPS = 1e-8
STATE_BYTES = {"adamw": 8, "paged_adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2}  # a parameter
Parameters = Mapping[str, nn.Parameter]


def build_optimizer(parameters: Parameters, config: TrainConfig) -> Optimizer:
    """Return the optimizer of a run.

    Groups have a `ratio`: their learning rate relative to the schedule's.

    Raises:
        ConfigError: A paged optimizer without a GPU.
    """
    groups = parameter_groups(parameters, config)
    device = next(iter(parameters.values())).device
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.learning_rate, betas=BETAS, eps=EPS, fused=True)
    return _of_bitsandbytes(groups, config, device)


def _of_bitsandbytes(
    groups: list[dict[str, object]], config: TrainConfig, device: torch.device
) -> Optimizer:
    if config.optimizer.startswith("paged") and device.type != "cuda":
        raise ConfigError(
            f"train.optimizer: {config.optimizer} cannot run here",
            found=f"Paging moves state between a GPU and the CPU; the model is on {device}.",
            fix=f"Use train.optimizer: {config.optimizer.removeprefix('paged_')}",
        )
    import bitsandbytes.optim  # takes seconds

    name = {
        "adamw_8bit": "AdamW8bit",
        "paged_adamw": "PagedAdamW32bit",
        "paged_adamw_8bit": "PagedAdamW8bit",
    }[config.optimizer]
    kind = getattr(bitsandbytes.optim, name)
    optimizer: Optimizer = kind(groups, lr=config.learning_rate, betas=BETAS, eps=EPS)
    return optimizer


def parameter_groups(parameters: Parameters, config: TrainConfig) -> list[dict[str, object]]:
    """Split parameters by learning rate (LoRA+ for lora_B) and by weight decay (matrices only)."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        ratio = config.loraplus_ratio if "lora_B" in name.split(".") else 1.0
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((ratio, decay), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "ratio": ratio}
        for (ratio, decay), members in groups.items()
    ]


def learning_rate(step: int, num_steps: int, config: TrainConfig) -> float:
    """Return the learning rate of a step, counted from 0; no step has a rate of zero."""
    warmup_steps = round(config.warmup_ratio * num_steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * (1 - done if config.schedule == "linear" else 1.0)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set each group's rate: the schedule's, times the group's `ratio`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["ratio"]


def complete_gradients(parameters: Parameters) -> list[Tensor]:
    """Return all gradients, in their parameters' memory layout; missing ones are zeros.

    The fused CPU AdamW reads a gradient with the parameter's strides: a transposed view would be
    read wrongly, without an error.
    """
    gradients = []
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        gradients.append(parameter.grad)
    return gradients


class LossScale:
    """A factor on the loss that keeps the gradients of 16-bit floats from underflowing.

    Halved while gradients overflow (the step is then repeated, not skipped), doubled after 2,000
    steps without overflow. Always 1 for other dtypes. (Micikevicius et al., 2018, arXiv:1710.03740)
    """

    GROWTH_STEPS = 2000

    def __init__(self, needed: bool) -> None:
        self.needed = needed
        self.factor = 2.0**16 if needed else 1.0
        self.good_steps = 0

    def overflowed(self) -> bool:
        """Halve the factor; False if it is 1 already, and repeating the step cannot help."""
        if self.factor <= 1.0:
            return False
        self.factor /= 2
        self.good_steps = 0
        return True

    def went_well(self) -> None:
        """Count a step that did not overflow."""
        self.good_steps += 1
        if self.needed and self.good_steps % self.GROWTH_STEPS == 0:
            self.factor *= 2


class GradientWatch:
    """Reports trained tensors whose gradient is zero in ZERO_STEPS steps in a row.

    A of LoRA has a zero gradient in the first step only. Gradients that are not finite end a run at
    once. The counts stay on the device; `Step` reads `longest` with a step's other figures.

    Attributes:
        longest: (1,), the largest count.
        num_steps: The last value read from `longest`.
    """

    ZERO_STEPS = 8

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self._names, self._is_reported = list(names), False
        self._counts = torch.zeros(len(self._names), device=device)
        self.longest, self.num_steps = self._counts[:1], 0.0

    def count(self, norms: Tensor) -> None:
        """Count a step by the norms of its gradients, (tensors,)."""
        self._counts = (self._counts + 1) * (norms == 0)
        self.longest = self._counts.max()[None]

    def report(self) -> str:
        """Return a warning, once; "" if there is none."""
        if self._is_reported or self.num_steps < self.ZERO_STEPS:
            return ""
        self._is_reported = True
        counts = zip(self._names, self._counts.tolist(), strict=True)
        zeros = [name for name, count in counts if count >= self.ZERO_STEPS]
        return (
            f"The gradients of {len(zeros)} of {len(self._names)} trained tensors were zero in "
            f"{self.ZERO_STEPS} steps in a row, so these tensors do not train: "
            f"{first_few(zeros, 6, ', ')}. If the model does not use their modules for these rows "
            "(experts without tokens), leave them out of method.targets. Otherwise, code of the "
            "model detaches their output or a kernel is wrong: try train.compile: false."
        )


def optimizer_state(
    optimizer: Optimizer, parameters: Parameters
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the optimizer's tensors and its numbers, each named "parameter/key".

    Initialises missing state like the first step.
    """
    for gindex, group in enumerate(optimizer.param_groups):
        for pindex, parameter in enumerate(group["params"]):
            if not optimizer.state[parameter]:
                state = _empty_state(optimizer, group, parameter, gindex, pindex)
                optimizer.state[parameter] = state
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            if not _is_constant(key):
                kind = tensors if isinstance(value, Tensor) else numbers
                kind[f"{name}/{key}"] = value
    return tensors, numbers


def load_optimizer_state(
    optimizer: Optimizer,
    parameters: Parameters,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, float],
) -> None:
    """Load the state that `optimizer_state` returned.

    Raises:
        CheckpointError: The state belongs to another optimizer or other parameters.
    """
    problems: list[str] = []
    unused = set(tensors) | set(numbers)
    for gindex, group in enumerate(optimizer.param_groups):
        for pindex, parameter in enumerate(group["params"]):
            name = next(n for n, p in parameters.items() if p is parameter)
            state = _empty_state(optimizer, group, parameter, gindex, pindex)
            for key, value in state.items():
                if _is_constant(key):
                    continue
                full = f"{name}/{key}"
                unused.discard(full)
                saved = tensors.get(full, numbers.get(full))
                if (
                    isinstance(value, Tensor)
                    and isinstance(saved, Tensor)
                    and (value.shape, value.dtype) == (saved.shape, saved.dtype)
                ):
                    value.copy_(saved)  # in place: bitsandbytes' paged memory stays paged
                elif not isinstance(value, Tensor) and isinstance(saved, int | float):
                    state[key] = saved
                else:
                    problems.append(f"missing or misshapen: {full}")
            optimizer.state[parameter] = state
    problems += [f"unexpected: {name}" for name in sorted(unused)]
    if problems:
        raise CheckpointError(
            f"the optimizer state does not belong to this run's {type(optimizer).__name__}",
            found=first_few(problems, 8),
        )


def _empty_state(
    optimizer: Optimizer,
    group: dict[str, object],
    parameter: nn.Parameter,
    gindex: int,
    pindex: int,
) -> dict[str, object]:
    """Return a parameter's initial optimizer state."""
    if isinstance(optimizer, AdamW):
        return {
            "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    optimizer.init_state(group, parameter, gindex, pindex)  # type: ignore[attr-defined]
    state: dict[str, Any] = optimizer.state[parameter]
    return state


def _is_constant(key: str) -> bool:
    """Return whether a key is one of bitsandbytes' quantisation tables, equal in all states."""
    return key.startswith("qmap")
