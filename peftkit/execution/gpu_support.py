"""GPUs that torch cannot use, or cannot use fully, on this machine; reported at the start.

Sources: c10/cuda/CUDACachingAllocator.cpp (expandable segments), PyTorch issue 192330 (WSL2), and
torch.cuda.get_arch_list (architectures of a wheel).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import torch

from peftkit.events import Fallback
from peftkit.execution.out_of_memory import is_out_of_memory

ENABLED, DISABLED = "expandable_segments:True", "expandable_segments:False"
"""Settings of the CUDA allocator; batches of many lengths fragment fixed-size segments."""
DEVICES = Path("/dev")
NVIDIA, AMD = ("nvidia[0-9]*", "dxg"), ("kfd",)
"""Device files of the drivers; dxg: of any GPU under WSL."""
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables with which a user hides GPUs."""
WHEELS = "https://pytorch.org/get-started/locally"


def allocator_variables() -> tuple[str, ...]:
    """Return the environment variables of torch's allocator; the last one is peftkit's choice."""
    on_hip = ("PYTORCH_HIP_ALLOC_CONF",) * (torch.version.hip is not None)
    return ("PYTORCH_ALLOC_CONF", *on_hip, "PYTORCH_CUDA_ALLOC_CONF")


class Segments:
    """Enables expandable segments once, if the driver can map them.

    Attributes:
        problem: Why they are off although the system should support them, or "".
    """

    def __init__(self) -> None:
        self.problem, self._is_untested = "", False

    def enable(self) -> None:
        """Enable them, unless the environment sets them or the system lacks them.

        Windows does not support them, WSL fails at the first allocation, and cudaMallocAsync has no
        segments.
        """
        if sys.platform != "linux" or "microsoft" in platform.release().lower():
            return
        set_by_user = [name for name in allocator_variables() if os.environ.get(name)]
        for name in set_by_user or allocator_variables()[-1:]:
            settings = os.environ.get(name, "").rstrip(", ")
            if "expandable_segments" not in settings and "cudaMallocAsync" not in settings:
                os.environ[name] = f"{settings},{ENABLED}".lstrip(",")
                self._is_untested = True

    def check(self, device: torch.device) -> None:
        """Allocate a byte on a device; turn the segments off if that fails (vGPU, Jetson)."""
        if not self._is_untested:
            return
        self._is_untested = False
        try:
            torch.empty(1, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return
            self.problem = str(error).partition("\n")[0]
        else:
            return
        for name in allocator_variables():
            if ENABLED in (settings := os.environ.get(name, "")):
                os.environ[name] = settings.replace(ENABLED, DISABLED)  # for other processes too
                torch._C._accelerator_setAllocatorSettings(os.environ[name])

    @property
    def fallback(self) -> Fallback | None:
        """The fallback, if the driver cannot map expandable segments."""
        if not self.problem:
            return None
        return Fallback(
            path="The GPU's memory is allocated in segments of fixed size",
            cause=f"The driver refuses expandable segments: {self.problem}",
            cost="Rows of many lengths fragment the memory, and long ones may not fit.",
            fix=f"Update the driver, or set PYTORCH_CUDA_ALLOC_CONF={DISABLED} to skip this test.",
        )


SEGMENTS = Segments()
"""Of this process."""


def gpu_fallbacks() -> list[Fallback]:
    """Return the GPUs of this machine that torch cannot use, and features that they lack."""
    found = (_too_old(), SEGMENTS.fallback) if torch.cuda.is_available() else (_unused(),)
    return [fallback for fallback in found if fallback is not None]


def _unused() -> Fallback | None:
    """Return the fallback of a machine whose GPU torch does not find."""
    is_hidden = any(os.environ.get(name) in ("", "-1") for name in HIDING)
    if is_hidden or torch.backends.mps.is_available():
        return None
    cost = "The model runs on the CPU, tens of times slower."
    if torch.xpu.is_available():
        return Fallback(
            path="The Intel GPU is not used",
            cause="peftkit supports NVIDIA, AMD (ROCm) and Apple GPUs.",
            cost=cost,
            fix="Use a machine with one of them, or a small model.",
        )
    has_nvidia = _has(NVIDIA) or shutil.which("nvidia-smi") is not None
    if not (has_nvidia or _has(AMD)):
        return None
    build = torch.version.cuda or torch.version.hip
    if build is None:
        cause = f"This build of torch ({torch.__version__}) is for CPUs only."
        fix = f"Install torch for your GPU: {WHEELS}."
    elif has_nvidia and torch.version.hip is None:
        cause = (
            f"torch {torch.__version__} is built for CUDA {build}, and finds no GPU; the driver "
        )
        cause += f"is {_driver() or 'unknown'}. CUDA 13 needs at least driver 580."
        fix = f"Update the NVIDIA driver, or install torch for an older CUDA: {WHEELS}."
    else:
        cause = f"torch {torch.__version__} finds no GPU that it can use."
        fix = f"Install torch for your GPU and driver: {WHEELS}."
    return Fallback(path="The GPU of this machine is not used", cause=cause, cost=cost, fix=fix)


def _too_old() -> Fallback | None:
    """Return the fallback of a CUDA GPU that is older than all architectures of this torch."""
    if torch.version.hip is not None:
        return None
    built = [int(match[1]) for name in torch.cuda.get_arch_list() if (match := _arch(name))]
    major, minor = torch.cuda.get_device_capability()
    if not built or 10 * major + minor >= min(built):
        return None
    return Fallback(
        path=f"{torch.cuda.get_device_name()} is too old for this build of torch",
        cause=f"It has compute capability {major}.{minor}; torch {torch.__version__} has kernels "
        f"from {min(built) // 10}.{min(built) % 10} on.",
        cost='The first operation on it fails: "no kernel image is available".',
        fix=f"Install torch for CUDA 12.6, which has kernels from 5.0 on: {WHEELS}.",
    )


def _arch(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"(?:sm|compute)_(\d+)[a-z]?", name)


def _has(names: tuple[str, ...]) -> bool:
    return any(True for name in names for _ in DEVICES.glob(name))


def _driver() -> str:
    """Return the version of the NVIDIA driver, or ""."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", file.read_text()) if file.exists() else None
    return found[1] if found else ""
