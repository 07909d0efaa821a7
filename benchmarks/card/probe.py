"""The environment page of benchmarks.card: what this machine has, and how fast it is."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.card.job import Job, Line, left_clean, made, verdict
from benchmarks.card.operators import attention
from benchmarks.gpu import peak_of
from benchmarks.plan import Measured
from benchmarks.report import versions
from peftkit.execution.environment import free_now
from peftkit.execution.gpu_support import SEGMENTS, allocator_variables, gpu_fallbacks
from peftkit.execution.out_of_memory import one_line
from peftkit.execution.plan import ExecutionPlan
from peftkit.kernels.device import (
    PINNING,
    free_bytes,
    gpu_of,
    launch_seconds,
    pinned_empty,
    product_rate,
)

GB = 1e9
REPEATS = 5
SMI = "driver_version,memory.total,pcie.link.gen.max,pcie.link.width.current,power.limit"
"""What nvidia-smi is queried for; it uses NVML."""
HOST_TOKENS = 16
"""Tokens of a row whose step takes only the time of launching its kernels."""


def environment(job: Job) -> Iterator[Line]:
    """The machine, the code paths that follow from it, and its measured rates."""
    yield "what", "value", "well"
    for name, value in _machine(job):
        yield name, value, ""
    for fallback in gpu_fallbacks():
        yield fallback.path, fallback.cause, verdict(False)
    if job.device.type == "cuda":
        yield _architecture(job.device)
        for name, value in _allocator():
            yield name, value, ""
        problem = SEGMENTS.problem
        yield "expandable segments probe", problem or "no failure", verdict(not problem)
    plan = ExecutionPlan(device=job.device.type)
    yield "LoRA layers grouped, kernels fused", f"{plan.lora_grouped}, {plan.fused_kernels}", ""
    for kind, dtype, kernel in list(attention(job))[1:]:
        yield f"attention, {kind}, {dtype}", kernel, ""
    for name, value in _rates(job):
        yield name, value, ""
    for name, value in versions().items():
        yield name, value, ""


def tried(ask: Callable[[], Any]) -> str:
    """Return an answer, or the error that was raised instead of it."""
    try:
        return str(ask())
    except Exception as error:
        return one_line(error)[:100]


def _machine(job: Job) -> Iterator[tuple[str, str]]:
    gpu, here, free = gpu_of(job.device), free_now(job.device), free_bytes()
    yield "device", str(job.device) if gpu is None else gpu.name(job.device)
    yield "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    yield "WSL", "yes" if "microsoft" in platform.release().lower() else "no"
    yield "free for tensors", f"{here.usable / GB:.1f} GB"
    yield "free main memory", "unknown" if free is None else f"{free / GB:.1f} GB"
    yield "fastest dtype", str(job.dtype).removeprefix("torch.")
    if job.device.type == "cuda":
        yield "CUDA of torch", str(torch.version.cuda or torch.version.hip)
        yield f"nvidia-smi: {SMI}", tried(_smi)
        yield "NVML", tried(_nvml)


def _smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=True
    ).stdout.strip()


def _nvml() -> str:
    """Initialise NVML; torch's allocator asserts that it succeeds when memory runs out."""
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    status = ctypes.CDLL(name).nvmlInit_v2()
    return "initialised" if status == 0 else f"nvmlInit_v2 returns {status}"


def _architecture(device: torch.device) -> Line:
    """Return whether torch has machine code for the card's compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    is_built = torch.version.hip is not None or any(_runs(name, major, minor) for name in built)
    return f"compute capability {major}.{minor}; torch has", " ".join(built), verdict(is_built)


def _runs(name: str, major: int, minor: int) -> bool:
    """Return whether a card runs code of an architecture: of its major version, or PTX."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
    if found is None:
        return False
    built = int(found[2]), int(found[3])
    return built <= (major, minor) and (found[1] == "compute" or built[0] == major)


def _allocator() -> Iterator[tuple[str, str]]:
    for name in allocator_variables():
        yield name, os.environ.get(name, "not set")
    yield "allocator", tried(torch.cuda.memory.get_allocator_backend)
    yield "allocator settings in force", tried(_settings)
    yield "segments that are expandable", tried(_expandable)


def _settings() -> Any:
    return torch.cuda.memory._snapshot()["allocator_settings"]


def _expandable() -> str:
    held = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    number = sum(bool(segment.get("is_expandable")) for segment in segments)
    return f"{number} of {len(segments)} with {held.nbytes >> 20} MiB allocated"


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call, until the device has ended it."""
    times = []
    for _ in range(REPEATS + 1):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rates(job: Job) -> Iterator[tuple[str, str]]:
    """Products, copies within the card and over the bus, and the host's share of a step."""
    size, device = job.probe_size, job.device
    with left_clean():
        matrix = torch.randn(size, size, device=device).to(job.dtype)
        rate = 2 * size**3 / _seconds(lambda: matrix @ matrix, device)
        peak = peak_of(job.device_name)
        shown = f"{rate / 1e12:.4g} TFLOP/s, planned with {product_rate(device) / 1e12:.4g}"
        of_peak = f", {rate / (1e12 * peak):.0%} of {peak:g}" if peak else ""
        yield f"products of {size} x {size} matrices", shown + of_peak
        target = torch.empty_like(matrix)
        seconds = _seconds(lambda: target.copy_(matrix), device)
        yield "copy on the device, read and written", f"{2 * matrix.nbytes / seconds / GB:.4g} GB/s"
        pinned = pinned_empty(matrix.shape, matrix.dtype)
        kinds = {"pinned": pinned, "pageable": torch.empty_like(pinned, pin_memory=False)}
        for name, host in kinds.items():
            for way, run in _copies(matrix, host).items():
                speed = matrix.nbytes / _seconds(run, device) / GB
                yield f"copy {way} the device, {name}", f"{speed:.4g} GB/s"
        yield f"pinning {pinned.nbytes / 1e6:.4g} MB", PINNING.problem or "succeeds"
    with left_clean():
        measured = Measured.around(made(job, device, "none", job.dtype), device)
        with measured.steps("keep", HOST_TOKENS) as step:
            seconds = _seconds(step, device) / job.layers
        planned = f"{1e3 * launch_seconds():.1f} ms"
        name = f"micro-batch of {HOST_TOKENS} tokens, host time per block"
        yield name, f"{1e3 * seconds:.1f} ms, planned with {planned}"


def _copies(here: Tensor, host: Tensor) -> dict[str, Callable[[], object]]:
    return {
        "to": lambda: here.copy_(host, non_blocking=True),
        "from": lambda: host.copy_(here, non_blocking=True),
    }
