"""The machine: a device, its memory, and the processes that were launched together.

The only place that asks the machine. An `Environment` can also describe another machine. Sizes are
in bytes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

import torch

from peftkit.errors import ConfigError
from peftkit.kernels.device import free_bytes, gpu_of, local_gpu, resident_bytes

GPU_SHARE = 0.95
"""Share of a GPU's memory that can be allocated."""
PROCESS_BYTES = {"cpu": 700_000_000, "cuda": 450_000_000}
"""Memory of a process before any model: Python with torch and transformers; CUDA's context."""

SEGMENTS = "expandable_segments:True"
"""Setting of CUDA's allocator: batches of many lengths fragment segments that cannot grow."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads its allocator's settings; the first one counts where both are set."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A device, and the processes that each have one like it.

    Attributes:
        kind: Of the device: cpu, cuda or mps.
        memory: Total of a GPU, free main memory of a CPU; None where the system does not say.
        share: Usable share of the memory.
        process: Memory of the process itself; 0 if `memory` is already without it.
        world_size: Processes of the run.
    """

    kind: str
    memory: int | None
    share: float = 1.0
    process: int = 0
    world_size: int = 1

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

    def at_most(self, num_bytes: int) -> Environment:
        """Return the environment with its memory limited."""
        memory = num_bytes if self.memory is None else min(self.memory, num_bytes)
        return replace(self, memory=max(memory, 0))


def gpu_of_size(memory: int) -> Environment:
    """Return a CUDA GPU with that many bytes of memory."""
    return Environment("cuda", memory, GPU_SHARE, PROCESS_BYTES["cuda"])


def this_machine() -> Environment:
    """Return the environment of a run on this machine.

    Raises:
        ConfigError: The system does not say how much memory is free.
    """
    if (here := local_gpu()) is not None:
        device, gpu = here
        process = PROCESS_BYTES.get(device.type, 0)
        return Environment(device.type, gpu.total(device), GPU_SHARE, process)
    free = free_bytes()
    if free is None:
        raise ConfigError(
            "this machine does not tell how much memory is free.",
            fix="Say what to plan for: --memory 8GB (a GPU's).",
        )
    return Environment("cpu", free, process=PROCESS_BYTES["cpu"])


def free_now(device: torch.device | None = None) -> Environment:
    """Return the memory that is free for this process; a run's processes share main memory."""
    device = default_device() if device is None else device
    if (gpu := gpu_of(device)) is not None:
        left = int(GPU_SHARE * gpu.total(device)) - gpu.used(device)
        return Environment(device.type, max(left, 0), world_size=world_size())
    free = free_bytes()
    share = None if free is None else free // world_size()
    return Environment("cpu", share, world_size=world_size())


def used_bytes(device: torch.device) -> int:
    """Return the memory in use: of a GPU by all processes, less torch's cache; else by this one."""
    gpu = gpu_of(device)
    return resident_bytes() if gpu is None else gpu.used(device)


def world_size() -> int:
    """Return how many processes the launcher has started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the number of this process among those on this machine."""
    return max(int(os.environ.get("LOCAL_RANK", "0")), 0)


def is_main_process() -> bool:
    """Return whether this process, of those that the launcher has started, writes the files."""
    return int(os.environ.get("RANK", "0")) == 0


def default_device() -> torch.device:
    """Return this process's device: a GPU if there is one, and make it the current one.

    GPUs are numbered as accelerate does: where every process sees one GPU alone, all have number 0.
    """
    here = local_gpu()
    if here is None:
        return torch.device("cpu")
    if here[0].type != "cuda":
        return here[0]
    return as_current(torch.device("cuda", local_rank() % torch.cuda.device_count()))


def as_current(device: torch.device) -> torch.device:
    """Make a device the current one of its kind; return it with its number."""
    if device.type != "cuda":
        return device
    _let_segments_grow()
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _let_segments_grow() -> None:
    """Add to the allocator's settings that segments grow, unless the user says how they do.

    Windows has no growing segments, and CUDA's own asynchronous allocator no segments.
    """
    if sys.platform != "linux":
        return
    given = [name for name in ALLOCATOR_VARIABLES if os.environ.get(name)]
    for name in given or ALLOCATOR_VARIABLES[-1:]:
        settings = os.environ.get(name, "").rstrip(", ")
        if "expandable_segments" not in settings and "cudaMallocAsync" not in settings:
            os.environ[name] = f"{settings},{SEGMENTS}".lstrip(",")
