"""What the loop asks of a model, whatever its kind; and how it is computed, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.base.sharding import is_sharded
from peftkit.errors import ConfigError
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.world import World
from peftkit.kernels.device import gpu_of
from peftkit.methods.lora_linear import LoRALinear
from peftkit.model.blocks import STREAMED
from peftkit.model.fused import num_fused
from peftkit.settings import TrainConfig
from peftkit.train.memory.blocks import Blocks


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what is to be trained, by name.

    Raises:
        ConfigError: Nothing requires a gradient, or it cannot be trained in its dtype or place.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError(
            f"there is nothing to train in {type(model).__name__}",
            found="None of its parameters requires a gradient.",
            fix="Put an adapter on it first: attach(model, LoRA(...)).",
        )
    half = [name for name, p in parameters.items() if p.dtype == torch.float16]
    if half:
        raise ConfigError(
            "adapters cannot be trained in fp16",
            found=f"{half[0]} and {len(half) - 1} more are.",
            fix="Use method.dtype: fp32 (or bf16); the base may be fp16.",
        )
    devices = sorted({str(p.device) for p in parameters.values()})
    if len(devices) > 1:
        raise ConfigError("the adapter is on more than one device", found=", ".join(devices))
    return parameters


def same_everywhere(model: nn.Module) -> list[Tensor]:
    """Return what all processes have to hold alike: what is trained, and the buffers beside it.

    Such as the start that is subtracted of PiSSA's and OLoRA's updates.
    """
    found: list[Tensor] = []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        found += [*own, *(module.buffers(recurse=False) if own else ())]
    return found


def device_name(device: torch.device, num_processes: int) -> str:
    """Return a device for people: "cpu", "NVIDIA H200", "2 x NVIDIA H200"."""
    gpu = gpu_of(device)
    name = str(device) if gpu is None else gpu.name(device)
    return f"{num_processes} x {name}" if num_processes > 1 else name


PREFIX = "peftkit_"
"""Names of our own attention functions."""


def execution_paths(model: nn.Module, blocks: Blocks, of_task: Mapping[str, str]) -> str:
    """Return "attention: grouped; LoRA: 2 groups of 5 layers; blocks: compiled".

    Args:
        of_task: How the task computes what.
    """
    parts = []
    of_task = dict(of_task)
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    attention = of_task.pop("attention", found)
    if attention is not None:
        parts.append(f"attention: {str(attention).removeprefix(PREFIX)}")
    if (layers := _layers(model)) != "":
        parts.append(f"LoRA: {layers}")
    if fused := num_fused(model):
        parts.append(f"fused: {fused} norms, gated layers and rotations")
    if blocks.blocks:
        how = "compiled" if blocks.compiled else "not compiled"
        ways = {
            "keep": "",
            "recompute": ", recomputed",
            "offload": ", recomputed, inputs offloaded",
        }
        parts.append(f"blocks: {how}{ways[blocks.activations]}")
    return "; ".join([*parts, *(f"{what}: {how}" for what, how in of_task.items())])


def _layers(model: nn.Module) -> str:
    """Say how many LoRA layers are computed in groups."""
    groups = [module.group for module in model.modules() if isinstance(module, LoRALinear)]
    num_alone, num_groups = groups.count(None), len({*groups} - {None})
    parts = [f"{num_groups} groups of {len(groups) - num_alone} layers"] if num_groups else []
    return ", ".join(parts + ([f"{num_alone} layers each on its own"] if num_alone else []))


def plan_as_found(model: Any, config: TrainConfig, world: World) -> ExecutionPlan:
    """Return how a loaded model goes through its rows, before anything is measured."""
    first = next(model.parameters())
    return config.plan(
        world.device.type,
        world.world_size,
        placement="stream" if hasattr(model, STREAMED) else "device",
        shard="base" if is_sharded(model) else "none",
        dtype=str(getattr(model, "dtype", first.dtype)).removeprefix("torch."),
        autocast=world.precision or "",
    )
