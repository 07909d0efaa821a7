"""Kinds of GPU, with torch's functions for their memory and generators; main memory.

Apple's MPS shares the machine's memory and has none of peftkit's kernels, no pinned memory and no
streams. Nothing in this module was run on Apple hardware.

The functions for this process's main memory do nothing on systems without these calls (Windows).
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.events import Fallback

Device = torch.device


@dataclass(frozen=True, slots=True)
class Gpu:
    """Torch's functions for one kind of GPU; sizes are in bytes.

    Attributes:
        is_there: Whether this machine has one.
        fast_dtype: The dtype with the fastest products.
        total: Its memory.
        used: Memory in use by all processes, without torch's releasable cache.
        peak: Peak memory that this process allocated since `restart`, or the best estimate.
        restart: Reset the peak.
        release: Release torch's cached memory.
        retries: How often the allocator released its cache to serve an allocation.
        get_rng, set_rng: State of its generator, a tensor on the CPU.
        name: Its name, for output.
    """

    is_there: Callable[[], bool]
    fast_dtype: Callable[[], torch.dtype]
    total: Callable[[Device], int]
    used: Callable[[Device], int]
    peak: Callable[[Device], int]
    restart: Callable[[Device], None]
    release: Callable[[], None]
    retries: Callable[[Device], int]
    get_rng: Callable[[Device], Tensor]
    set_rng: Callable[[Tensor, Device], None]
    name: Callable[[Device], str]


def _cuda_used(device: Device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _mps_dtype() -> torch.dtype:
    # no float16: it requires loss scaling, which is supported on CUDA only
    return torch.bfloat16 if torch.backends.mps.is_macos_or_newer(14, 0) else torch.float32


# Looked up at each call, because a simulated card replaces torch's functions.
GPUS = {
    "cuda": Gpu(
        is_there=lambda: torch.cuda.is_available(),
        fast_dtype=lambda: torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16,
        total=lambda device: torch.cuda.get_device_properties(device).total_memory,
        used=_cuda_used,
        peak=lambda device: torch.cuda.max_memory_allocated(device),
        restart=lambda device: torch.cuda.reset_peak_memory_stats(device),
        release=lambda: torch.cuda.empty_cache(),
        retries=lambda device: torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
        get_rng=lambda device: torch.cuda.get_rng_state(device),
        set_rng=lambda state, device: torch.cuda.set_rng_state(state, device),
        name=lambda device: torch.cuda.get_device_name(device),
    ),
    "mps": Gpu(
        is_there=lambda: torch.backends.mps.is_available(),
        fast_dtype=_mps_dtype,
        total=lambda device: torch.mps.recommended_max_memory(),
        used=lambda device: torch.mps.current_allocated_memory(),
        peak=lambda device: torch.mps.driver_allocated_memory(),  # cached until it is released
        restart=lambda device: torch.mps.empty_cache(),
        release=lambda: torch.mps.empty_cache(),
        retries=lambda device: 0,
        get_rng=lambda device: torch.mps.get_rng_state(),
        set_rng=lambda state, device: torch.mps.set_rng_state(state),
        name=lambda device: "Apple GPU",
    ),
}


def gpu_of(device: Device) -> Gpu | None:
    """Return the `Gpu` of a device; None for a CPU."""
    return GPUS.get(device.type)


def local_gpu() -> tuple[Device, Gpu] | None:
    """Return the kind of GPU of this machine; None without a GPU."""
    return next(((Device(kind, 0), gpu) for kind, gpu in GPUS.items() if gpu.is_there()), None)


_PER_CYCLE = {(7, 0): 1024, (8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
"""Dense 16-bit FLOPs with fp32 sums of a multiprocessor per cycle, by compute capability."""
_FEWEST_PER_CYCLE = 512
"""Of consumer cards (T4, RTX 3090, 4090, 5090), and where unknown."""
_CLOCK = 1.8e9
PRODUCTS_REACH = 0.8
"""Share of the peak rate that large matrix products reach."""


def product_rate(device: Device) -> float:
    """Return the estimated FLOP/s of 16-bit matrix products of a CUDA GPU; 0 for other devices."""
    if device.type != "cuda":
        return 0.0
    per_cycle = _PER_CYCLE.get(torch.cuda.get_device_capability(device), _FEWEST_PER_CYCLE)
    return PRODUCTS_REACH * _CLOCK * per_cycle * num_processors(device)


def num_processors(device: Device) -> int:
    """Return the number of multiprocessors of a CUDA GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


ASSUMED_LAUNCH_SECONDS = 5e-3
"""Time in which Python launches a block's forward and backward pass, on a machine without CUDA. A
virtual machine with an H100 took 10 ms."""
LAYERS_OF_BLOCK, TIMED_LAYERS, TIMED_TRIALS = 80, 40, 5
"""A block of a Llama takes as long as about 80 of the small layers that are timed: between 40 and
95 on a busy CPU, with tensors so small that only Python and torch's dispatcher take time."""
FEWEST_BUSY, MOST_BUSY = 512, 4096
"""Bounds of `busy_tokens`: below the first, a product waits for its weights on any GPU."""


@cache
def start_backward_thread(device: Device) -> None:
    """Make CUDA's context current in the thread in which autograd computes on a device.

    torch does not, for the first card. The first kernel does, unless it is a product: cuBLAS warns
    that there is no context (PyTorch's pull request 120131).
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones(1, device=device, requires_grad=True).square().sum().backward()


def launch_seconds() -> float:
    """Return the time in which Python launches a block's forward and backward pass.

    Measured once in a process on a machine with CUDA, otherwise ASSUMED_LAUNCH_SECONDS.
    """
    return measured_launch_seconds() if torch.cuda.is_available() else ASSUMED_LAUNCH_SECONDS


@cache
def measured_launch_seconds() -> float:
    """Return the launch time of a block on the current CUDA card, estimated from small layers.

    Rounded to a power of the square root of two: the next run should plan like this one.
    """
    trials = []
    with torch.inference_mode(False), torch.enable_grad():
        x, a, b = (
            torch.ones(*size, device="cuda", requires_grad=True)
            for size in ((16, 32), (4, 32), (32, 4))
        )
        for _ in range(TIMED_TRIALS):
            torch.cuda.synchronize()
            began, out = time.perf_counter(), x
            for _ in range(TIMED_LAYERS):
                out = _SmallLayer.apply(out, a, b)
            out.square().sum().backward()
            torch.cuda.synchronize()
            trials.append(time.perf_counter() - began)
    seconds = LAYERS_OF_BLOCK / TIMED_LAYERS * min(trials)
    return float(2 ** (round(2 * math.log2(seconds)) / 2))


class _SmallLayer(torch.autograd.Function):
    """x + B A x with a backward pass in Python, as peftkit's LoRA layers have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b)
        return x + functional.linear(functional.linear(x, a), b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, a, b = ctx.saved_tensors
        back = grad @ b
        return grad + back @ a, back.t() @ x, grad.t() @ functional.linear(x, a)


def busy_tokens(rate: float, num_parameters: int, num_blocks: int) -> int:
    """Return the tokens per micro-batch below which a GPU waits for Python.

    A token takes 4 FLOPs per parameter, since frozen weights need no gradient.

    Args:
        rate: FLOP/s of matrix products; 0: not a GPU, or unknown.
    """
    if not rate:
        return 1
    tokens = round(launch_seconds() * num_blocks * rate / (4 * max(num_parameters, 1)))
    return min(max(tokens, FEWEST_BUSY), MOST_BUSY)


def is_before_ampere(device: Device) -> bool:
    """Return whether a device is a CUDA card without bf16 and flash attention (T4, V100)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


WITHOUT_FLOAT64 = ("mps",)
"""Kinds of devices on which torch raises if a tensor is in float64."""


def near_float64(device: Device) -> Device:
    """Return a device, or the CPU if the device has no float64 (MPS)."""
    return Device("cpu") if device.type in WITHOUT_FLOAT64 else device


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has no float64 (MPS)."""
    return tensor.to(near_float64(tensor.device)).double()


def forked_generators(device: Device, *, enabled: bool = True) -> AbstractContextManager[None]:
    """Restore the generators of the CPU and of a device at the end of the context."""
    if gpu_of(device) is None:
        return torch.random.fork_rng(devices=[], enabled=enabled)
    return torch.random.fork_rng(devices=[device], device_type=device.type, enabled=enabled)


class Pinning:
    """Notes that main memory could not be pinned, which is reported once."""

    def __init__(self) -> None:
        self.problem, self._is_reported = "", False

    def failed(self, error: Exception) -> None:
        self.problem = self.problem or str(error).partition("\n")[0]

    def report(self) -> str:
        """Return the fallback in words at the first call after a failure; else ""."""
        fallback = None if self._is_reported else self.fallback
        self._is_reported = self._is_reported or fallback is not None
        return "" if fallback is None else fallback.text

    @property
    def fallback(self) -> Fallback | None:
        """The fallback, if memory could not be pinned."""
        if not self.problem:
            return None
        return Fallback(
            path="Copies to the GPU are from pageable memory",
            cause=f"Main memory could not be pinned: {self.problem}",
            cost="A copy takes about twice as long and blocks Python.",
            fix="Raise the limit of locked memory (ulimit -l), or free main memory.",
        )


PINNING = Pinning()
"""The failures of this process."""


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return empty main memory, pinned where the system allows; torch rounds up to powers of two.

    CUDA reports a failure to pin as out of device memory, so the error must not escape.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        PINNING.failed(error)
        return torch.empty(shape, dtype=dtype)


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in pinned memory, or the tensor itself if pinning fails."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        PINNING.failed(error)
        return tensor


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""
LARGE = 1 << 23
"""Bytes of a large allocation: a weight rather than hidden states."""


def keep_freed_memory(*, large_ones: bool = True) -> None:
    """Make glibc keep large freed blocks, since the next step allocates the same sizes.

    By default it returns them to the system, and every step faults in fresh pages: a fifth of a
    small model's step on a CPU. The setting holds until the process ends; it needs glibc.

    Args:
        large_ones: If False, blocks of at least LARGE are returned when they are freed, because
            streamed weights would leave holes that do not fit the next weights.
    """
    library = _libc()
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30 if large_ones else LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def trim_malloc() -> None:
    """Return free pages that `keep_freed_memory` retained to the system.

    Blocks of varying size leave holes, and the process grows: by a third in 250 steps of a small
    model. The next step faults in fresh pages once.
    """
    library = _libc()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows: None does not refer to a library there
        return None


def resident_bytes() -> int:
    """Return this process's main memory in use; if unknown, the peak or 0."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_resident_bytes()
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return 1024 * int(lines["VmRSS"].split()[0])


def peak_resident_bytes() -> int:
    """Return this process's peak of main memory; 0 if unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Return the main memory that this process may still allocate, by the system and its cgroup.

    None if unknown (macOS, Windows).
    """
    if not MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    free = 1024 * int(lines.get("MemAvailable", "0 kB").split()[0])
    limit, used, parts = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        cached = 0  # of files: the system evicts them when memory is needed
        if parts.exists():
            sizes = dict(line.split() for line in parts.read_text().splitlines())
            cached = int(sizes.get("inactive_file", 0)) + int(sizes.get("active_file", 0))
        free = min(free, int(limit.read_text()) - int(used.read_text()) + cached)
    return max(free, 0)
