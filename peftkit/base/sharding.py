"""A frozen base that is sharded over the processes of a run, block by block (FSDP2).

Each process keeps its part of every block, in the bits that the base is kept in; a block's parts
are gathered when it computes and given up after it. Adapters stay whole on every process, and their
gradients are summed once a step, as without sharding. torch's `fully_shard` does all of it: packed
weights travel as bytes with their scales, and whatever has no dimension to cut stays whole.

All processes have to run the model equally often: see tasks/lockstep.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from peftkit.execution.world import World
from peftkit.model.blocks import recomputable_blocks
from peftkit.quant.layers import packed_tensors


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model is sharded over processes."""
    return isinstance(model, FSDPModule)


def shard_base(model: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Keep only this process's part of a frozen base, on its device; to be called on all processes.

    Args:
        model: With its adapter, on the CPU or on the device; what is trained stays whole.
        offload: Keep the parts in main memory; only what computes is on the device.

    Raises:
        ConfigError: The model has no blocks, or leaves some out by chance.
    """
    blocks, name = list(dict.fromkeys(recomputable_blocks(model))), type(model).__name__
    if not blocks:
        raise ConfigError(f"cannot shard {name}: it has no blocks", fix="Set train.shard: none.")
    if drops := _leaving_out(model):
        raise ConfigError(
            f"cannot shard {name}: each process leaves out other blocks while it trains",
            found=f"Its config.json has {drops}.",
            fix="Set it to 0 there, or train.shard: none.",
        )
    for _, _, packing in packed_tensors(model):
        packing.unpacked = None
    world = World(device)
    whole = {p for p in model.parameters() if p.requires_grad or p.dim() == 0}
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device)
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (world.world_size,)),
        "ignored_params": whole,
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if offload
        else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, **policy)
    # the head is called outside of the forward pass: it stays gathered until the backward pass
    fully_shard(model, reshard_after_forward=False, **policy)


def _leaving_out(model: Any) -> str:
    """Return what a model's config says of blocks that are left out at random, or ""."""
    config = getattr(model, "config", None)
    fields = config.to_dict() if config is not None else {}
    return next((f"{n}: {value}" for n, value in fields.items() if "layerdrop" in n and value), "")


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather what lies outside of the blocks, so that parts of the model can be called.

    Encoders are, before text is generated. To be called on all processes.
    """
    if isinstance(model, FSDPModule):
        model.unshard()
    yield


def local_bytes(model: nn.Module) -> Mapping[str, int]:
    """Return the bytes that this process keeps: of the base, and of what is trained."""
    sizes = {"base": 0, "trained": 0}
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        kind = "trained" if parameter.requires_grad else "base"
        sizes[kind] += local.numel() * local.element_size()
    return sizes
