"""A frozen base whose weights are spread over the processes of a run, block by block (FSDP2).

Each process keeps its part of every block, in the bits that the base is kept in; a block's parts
are gathered when it computes and given up after it. Adapters stay whole on every process, and their
gradients are summed once a step, as without sharding. torch's `fully_shard` does all of it: packed
weights travel as bytes with their scales, and whatever has no dimension to cut stays whole.

All processes have to run the model equally often: who has fewer rows runs it without learning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from peftkit.errors import ConfigError
from peftkit.kernels.packing import packed_tensors
from peftkit.train.config import TrainConfig
from peftkit.train.memory.blocks import Blocks
from peftkit.train.ranks import Ranks

METHODS = ("lora", "dora", "ia3", "vera")
"""Methods whose modules read the base's weights within its blocks alone."""
UNEVEN = ("preference", "reward", "embedding", "image_text")
"""Tasks that may run the model a different number of times on each process."""


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model's weights are spread over processes."""
    return isinstance(model, FSDPModule)


def check_sharding(config: TrainConfig, method: str, task: str) -> None:
    """Make sure that a run can be sharded, before anything is loaded.

    Raises:
        ConfigError: There is one process; or a method, a task or a setting does not go with it.
    """
    asked = f"train.shard: {config.shard}"
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            f"{asked} spreads the base over several processes",
            found="There is one process.",
            fix="accelerate launch --num_processes 2 -m peftkit_cli train RECIPE.yaml",
        )
    if method not in METHODS:
        raise ConfigError(
            f"{asked} does not go with method.type: {method}",
            found=f"Methods that do: {', '.join(METHODS)}.",
            fix="Set train.shard: none, or use one of these.",
        )
    if task in UNEVEN:
        raise ConfigError(
            f"{asked} does not go with the task {task}",
            found="It may run the model a different number of times on each process.",
            fix="Set train.shard: none.",
        )
    if config.sample_every or config.eval_generate:
        raise ConfigError(
            f"{asked} does not go with what the main process generates alone",
            found="train.sample_every or train.eval_generate is set.",
            fix="Leave it out; peftkit generate and eval do it afterwards.",
        )


def shard_base(model: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Keep only this process's part of a frozen base, on its device; to be called on all processes.

    Args:
        model: With its adapter, on the CPU or on the device; what is trained stays whole.
        offload: Keep the parts in main memory; only what computes is on the device.

    Raises:
        ConfigError: The model has no blocks.
    """
    blocks = Blocks(model).blocks
    if not blocks:
        raise ConfigError(
            f"cannot shard {type(model).__name__}: it has no blocks", fix="Set train.shard: none."
        )
    for _, _, packing in packed_tensors(model):
        packing.kept = None
    ranks = Ranks(device)
    whole = {p for p in model.parameters() if p.requires_grad or p.dim() == 0}
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device)
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (ranks.world_size,)),
        "ignored_params": whole,
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if offload
        else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, **policy)
    # the head is called beside the model's forward pass: it stays gathered until the backward pass
    fully_shard(model, reshard_after_forward=False, **policy)


def local_bytes(model: nn.Module) -> Mapping[str, int]:
    """Return the bytes that this process keeps: of the base, and of what is trained."""
    sizes = {"base": 0, "trained": 0}
    for parameter in model.parameters():
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        kind = "trained" if parameter.requires_grad else "base"
        sizes[kind] += own.numel() * own.element_size()
    return sizes
