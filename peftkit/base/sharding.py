"""A frozen base that is sharded over the ranks of a run, block by block (FSDP2).

Each rank keeps its shard of every block, packed if the base is. A block is gathered before it
computes and freed after it. Adapters are replicated, and their gradients are summed once a step, as
without sharding. torch's `fully_shard` does all of it: packed weights are gathered as bytes with
their scales, and tensors without a dimension to shard are replicated.

All ranks must run the model equally often: see train/batches.py.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from peftkit.base.build import LoadedModel, build
from peftkit.base.pretrained import files_of
from peftkit.base.request import BaseRequest
from peftkit.base.skeleton import WeightFootprint, packed_skeleton
from peftkit.base.store import folder_of, keep, open_stored
from peftkit.base.streaming import AT_ONCE
from peftkit.errors import BaseError, ConfigError, OutputError
from peftkit.events import Listener, Notice
from peftkit.execution.world import World
from peftkit.files import disk
from peftkit.files.tensors import DTYPES, open_tensors
from peftkit.model.blocks import SHARDED, recomputable_blocks
from peftkit.model.places import head_modules
from peftkit.quant.layers import packed_tensors

SHARDS_PACKED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch shards tensors of integers: older releases give their shards a gradient."""


def open_together(request: BaseRequest, world: World, on_event: Listener) -> LoadedModel:
    """Open a base on several ranks, which all map the same files.

    The base's files are mapped if they hold the weights in their final dtype. Otherwise the first
    rank of a machine packs them into the cache, weight by weight, and all ranks map the result.

    Raises:
        BaseError: It cannot be built.
        OutputError, RunError: The cache cannot be written, or the disk is full.
    """
    folder = folder_of(request, shared=True) if request.settings.store == "auto" else None
    if folder is None:
        return build(request, on_event=on_event)
    if request.settings.quantize == "none" and _is_in_files(request):
        return build(request, on_event=on_event)
    if world.is_first_here:
        try:
            open_stored(folder, request)
        except BaseError:
            with Spill(folder.parent) as spill:
                keep(folder, build(request, put=spill.moved, on_event=on_event), request)
            on_event(Notice(f"The base is stored in {folder}, from which all processes map it."))
    world.wait()
    return open_stored(folder, request, is_known=True)


def _is_in_files(request: BaseRequest) -> bool:
    """Return whether the files hold all weights except the head in their final shapes and dtypes.

    transformers then converts nothing and maps the pages of these files.
    """
    in_files: Counter[tuple[tuple[int, ...], Any]] = Counter()
    source = files_of(request.location)
    for path in source.glob("*.safetensors") if source else ():
        with open_tensors(path, error=BaseError) as file:
            entries = file.header.tensors.values()
            in_files.update((entry.shape, DTYPES[entry.dtype][1]) for entry in entries)
    model = packed_skeleton(request.config, request.settings, request.purpose, request.dtype)
    head = head_modules(model) if request.purpose.head is not None else ()
    needed = [p for name, p in model.named_parameters() if not (head and name.startswith(head))]
    return not Counter((tuple(p.shape), p.dtype) for p in needed) - in_files


class Spill:
    """Moves tensors into an unnamed file, for a base that is larger than memory.

    The file's pages stay valid after the context ends.

    Args:
        folder: A folder on a disk with room for all tensors; it is created if needed.
    """

    def __init__(self, folder: Path) -> None:
        disk.writable_folder(folder)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._folder, self._end = folder, 0

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that is backed by the file's pages.

        Raises:
            OutputError: The disk is full.
        """
        if not tensor.numel():
            return tensor
        on_cpu = tensor.detach().cpu().contiguous()
        start, size = self._end, on_cpu.nbytes
        try:
            # writing through the pages would raise a signal on a full disk, not an error
            values: Any = on_cpu.view(-1).view(torch.uint8).numpy()
            left = memoryview(values)
            while left:
                left = left[os.pwrite(self._file.fileno(), left, start + size - len(left)) :]
        except OSError as error:
            raise OutputError(f"cannot write into {self._folder}.", found=str(error)) from error
        self._end = -(-(start + size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self._file.fileno(), size, offset=start)
        return torch.frombuffer(pages, dtype=on_cpu.dtype).view(on_cpu.shape)


def shard_base(model: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Shard a frozen base, keeping this rank's shard on its device; called on all ranks.

    Args:
        model: A model with its adapter, on the CPU or on the device; trained weights stay whole.
        offload: Keep the shards in main memory and gather only the running block on the device.

    Raises:
        ConfigError: The model has no blocks, or skips some at random (layer dropout), or is packed
            and torch is too old.
    """
    blocks, name = list(dict.fromkeys(recomputable_blocks(model))), type(model).__name__
    if not blocks:
        raise ConfigError(f"cannot shard {name}: it has no blocks", fix="Set train.shard: none.")
    config = getattr(model, "config", None)
    fields = config.to_dict() if config is not None else {}
    if drops := [f"{n}: {value}" for n, value in fields.items() if "layerdrop" in n and value]:
        raise ConfigError(
            f"cannot shard {name}: each process skips different blocks during training",
            found=f"Its config.json has {drops[0]}.",
            fix="Set it to 0 there, or train.shard: none.",
        )
    packings = [packing for _, _, packing in packed_tensors(model)]
    if packings and not SHARDS_PACKED:
        raise ConfigError(
            f"cannot shard {name}: its weights are packed",
            found=f"torch {torch.__version__} shards weights of floating-point numbers only.",
            fix="Install torch 2.13 or newer, or set train.shard: none, or base.quantize: none.",
        )
    for packing in packings:
        packing.unpacked = None
    world = World(device)
    unsharded = {p for p in model.parameters() if p.requires_grad or p.dim() == 0}
    for tensor in (*unsharded, *model.buffers()):
        tensor.data = tensor.data.to(device)
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (world.world_size,)),
        "ignored_params": unsharded,
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if offload
        else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, **policy)
    setattr(model, SHARDED, True)
    # the head is called outside the forward pass: it stays gathered until the backward pass
    fully_shard(model, reshard_after_forward=False, **policy)


def gather(model: nn.Module) -> None:
    """Gather the weights outside the blocks, before a part of the model is called directly.

    Generation calls the encoder that way. Must be called on all ranks.
    """
    cast(FSDPModule, model).unshard()


def local_bytes(model: nn.Module) -> Mapping[str, int]:
    """Return the bytes that this rank holds of the base and of the trained weights."""
    sizes = {"base": 0, "trained": 0}
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        kind = "trained" if parameter.requires_grad else "base"
        sizes[kind] += local.numel() * local.element_size()
    return sizes


def sharded_footprint(
    model: nn.Module, num_devices: int, *, offload: bool = False
) -> WeightFootprint:
    """Return the footprint of a sharded base on each of several devices.

    A tensor is sharded along its first dimension, into shards of equal size. Weights outside the
    blocks, such as embeddings and head, stay gathered for the whole step; blocks are gathered once
    in the forward pass and once in the backward pass.
    """
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    blocks = []
    for block in recomputable_blocks(model):
        keys = [id(p) for p in block.parameters() if id(p) in frozen and p.dim()]
        blocks.append([frozen.pop(key) for key in keys])
    scalars = [tensor for tensor in frozen.values() if not tensor.dim()]
    rest = [tensor for tensor in frozen.values() if tensor.dim()]
    parts = sum(
        -(-tensor.shape[0] // num_devices) * (tensor.nbytes // max(tensor.shape[0], 1))
        for tensor in (*rest, *(tensor for block in blocks for tensor in block))
    )
    outside = sum(tensor.nbytes for tensor in rest)
    sizes = [sum(tensor.nbytes for tensor in block) for block in blocks]
    moved = (2 * sum(sizes) + outside) * (num_devices - 1) // num_devices
    passing = outside + AT_ONCE * max(sizes, default=0)
    always = sum(tensor.nbytes for tensor in scalars)
    if offload:
        return WeightFootprint(always, passing, moved + parts, parts)
    return WeightFootprint(always + parts, passing, moved)
