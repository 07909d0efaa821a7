"""A frozen base that is sharded over the processes of a run, block by block (FSDP2).

Each process keeps its part of every block, in the bits that the base is kept in; a block's parts
are gathered when it computes and given up after it. Adapters stay whole on every process, and their
gradients are summed once a step, as without sharding. torch's `fully_shard` does all of it: packed
weights travel as bytes with their scales, and whatever has no dimension to cut stays whole.

All processes have to run the model equally often: see train/lockstep.py.
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
from peftkit.base.purpose import head_modules
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
from peftkit.quant.layers import packed_tensors


def open_together(request: BaseRequest, world: World, on_event: Listener) -> LoadedModel:
    """Open a base on several processes, which all map the same files.

    The base's own files are mapped if they hold the weights in their final dtype. Otherwise the
    first process of a machine packs them into the cache, weight by weight, and all map the result.

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
            on_event(Notice(f"The base is kept in {folder}, from where all processes map it."))
    world.wait()
    return open_stored(folder, request, is_known=True)


def _is_in_files(request: BaseRequest) -> bool:
    """Tell whether the files hold all but a head in the final shapes and dtypes.

    transformers then converts nothing: what it loads are pages of these files.
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

    Its pages stay valid after the context ends.

    Args:
        folder: On a disk with room for them all; it is made if need be.
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
        """Return a tensor of the same values, whose memory is the file's pages.

        Raises:
            OutputError: The disk is full.
        """
        if not tensor.numel():
            return tensor
        on_cpu = tensor.detach().cpu().contiguous()
        start, size = self._end, on_cpu.nbytes
        try:
            # written through the pages a full disk would be a signal, not an error
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
    # the head is called outside of the forward pass: it stays gathered until the backward pass
    fully_shard(model, reshard_after_forward=False, **policy)


def _leaving_out(model: Any) -> str:
    """Return what a model's config says of blocks that are left out at random, or ""."""
    config = getattr(model, "config", None)
    fields = config.to_dict() if config is not None else {}
    return next((f"{n}: {value}" for n, value in fields.items() if "layerdrop" in n and value), "")


def gather(model: nn.Module) -> None:
    """Gather the weights outside of the blocks, so that parts of the model can be called.

    Encoders are, before text is generated. To be called on all processes.
    """
    cast(FSDPModule, model).unshard()


def local_bytes(model: nn.Module) -> Mapping[str, int]:
    """Return the bytes that this process keeps: of the base, and of what is trained."""
    sizes = {"base": 0, "trained": 0}
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        kind = "trained" if parameter.requires_grad else "base"
        sizes[kind] += local.numel() * local.element_size()
    return sizes


def sharded_footprint(
    model: nn.Module, num_devices: int, *, offload: bool = False
) -> WeightFootprint:
    """Return what each of several devices holds of a base that is sharded.

    A tensor is cut along its first dimension, into parts of one size. What is in no block, such as
    embeddings and head, is gathered for all of a step; blocks are gathered for the forward pass and
    for the backward pass.
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
