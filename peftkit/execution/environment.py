"""Device, memory and launched processes of this machine, or of another one to plan for.

Sizes are in bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from peftkit.errors import ConfigError
from peftkit.kernels.device import (
    free_bytes,
    gpu_of,
    local_gpu,
    resident_bytes,
    start_backward_thread,
)

GPU_SHARE = 0.95
"""Share of a GPU's memory that can be allocated."""
TRAINING_SHARE = 0.92
"""Share of a GPU's memory, or of train.memory, that a run plans for; the rest is fragments."""
AUTO_SHARE = 0.8
"""Share of the free main memory that a run plans for."""
WORKSPACES = 64 << 20
"""Memory of cuBLAS in the forward and the backward thread, from their first products: 32 MiB each
on an H100, 8 MiB on older cards."""
PROCESS_BYTES = {"cpu": 700_000_000, "cuda": 450_000_000 + WORKSPACES}
"""Memory of a process without a model: Python with torch and transformers; the CUDA context."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The device of each process of a run.

    Attributes:
        kind: Device type: cpu, cuda or mps.
        memory: Total memory of a GPU, free main memory of a CPU; None if the system does not
            report it.
        share: Usable fraction of the memory.
        process: Memory of the process itself; 0 if `memory` already excludes it.
        world_size: Number of processes of the run.
        main_memory: Main memory of a GPU's machine for weights and activations; None: unknown.
    """

    kind: str
    memory: int | None
    share: float = 1.0
    process: int = 0
    world_size: int = 1
    main_memory: int | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.kind != "cpu"

    @property
    def room(self) -> int:
        """Maximum memory of the process."""
        return int(self.share * (self.memory or 0))

    @property
    def usable(self) -> int:
        """Maximum memory of tensors."""
        return max(self.room - self.process, 0)


def gpu_of_size(memory: int) -> Environment:
    """Return the environment of a run on a CUDA GPU with `memory` bytes."""
    return Environment("cuda", memory, TRAINING_SHARE, PROCESS_BYTES["cuda"])


def this_machine() -> Environment:
    """Return the environment of a run on this machine.

    Raises:
        ConfigError: The system does not report its free memory.
    """
    if (here := local_gpu()) is not None:
        device, gpu = here
        process = PROCESS_BYTES.get(device.type, 0)
        free = free_bytes()
        main_memory = None if free is None else int(AUTO_SHARE * free)
        total = gpu.total(device)
        return Environment(device.type, total, TRAINING_SHARE, process, main_memory=main_memory)
    free = free_bytes()
    if free is None:
        raise ConfigError(
            "this machine does not report its free memory.",
            fix="Give the memory of a GPU to plan for: --memory 8GB",
        )
    return Environment("cpu", free, process=PROCESS_BYTES["cpu"])


def free_now(device: torch.device | None = None) -> Environment:
    """Return the free memory of this process; the processes of a run share main memory."""
    device = select_device() if device is None else device
    if (gpu := gpu_of(device)) is not None:
        left = int(GPU_SHARE * gpu.total(device)) - gpu.used(device)
        return Environment(device.type, max(left, 0), world_size=world_size())
    free = free_bytes()
    share = None if free is None else free // world_size()
    return Environment("cpu", share, world_size=world_size())


def free_for_training(device: torch.device, limit: float | None = None) -> Environment:
    """Return the free memory of this process that a run plans for, before its first product.

    Args:
        limit: `train.memory` in bytes; None: all of the memory.
    """
    here, gpu = free_now(device), gpu_of(device)
    if limit is not None:
        free = TRAINING_SHARE * limit - used_bytes(device)
    elif gpu is not None:
        free = TRAINING_SHARE * gpu.total(device) - gpu.used(device)
    elif here.memory is not None:
        free = AUTO_SHARE * here.memory
    else:
        return here
    process = WORKSPACES if here.kind == "cuda" else 0
    return replace(here, memory=max(int(free), 0), process=process)


def used_bytes(device: torch.device) -> int:
    """Return the memory in use: all of a GPU but torch's cache; on a CPU, by this process."""
    gpu = gpu_of(device)
    return resident_bytes() if gpu is None else gpu.used(device)


def world_size() -> int:
    """Return the number of processes that the launcher has started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the rank of this process on this machine."""
    return max(int(os.environ.get("LOCAL_RANK", "0")), 0)


def is_main_process() -> bool:
    """Return whether this process has rank 0 and writes the files."""
    return int(os.environ.get("RANK", "0")) == 0


def select_device() -> torch.device:
    """Select the device of this process, a GPU if there is one, and make it current.

    On CUDA, this also enables expandable segments in the allocator. GPUs are numbered as in
    accelerate: if each process sees one GPU, all have index 0.
    """
    if (here := local_gpu()) is None:
        return torch.device("cpu")
    if here[0].type != "cuda":
        return here[0]
    return as_current(torch.device("cuda", local_rank() % torch.cuda.device_count()))


def as_current(device: torch.device) -> torch.device:
    """Make a device current, also in autograd's thread, and return it with its index."""
    if device.type != "cuda":
        return device
    from peftkit.execution import gpu_support

    gpu_support.SEGMENTS.enable()  # before torch's allocator reads the environment
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    gpu_support.SEGMENTS.check(device)
    start_backward_thread(device)
    return device
