"""Recognise out-of-memory and compile errors, free memory, and format errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from peftkit.kernels.device import gpu_of, local_gpu

T = TypeVar("T")
NO_ROOM = "Allow fewer new tokens, or load the base in 4 bits (base.quantize: nf4)."
"""Fix for an out-of-memory error during a single completion."""
# messages of out-of-memory RuntimeErrors from torch and the vendors' libraries
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # NVML does not report the memory of MIG slices, Jetson and some containers (PyTorch 112377)
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
)
# of a full GPU, but also of a broken driver or an unsupported operation
_SIGNS_OF_A_FULL_GPU = ("CUBLAS_STATUS_NOT_INITIALIZED", "Unable to find an engine to execute")
LITTLE = 256 << 20
"""Free bytes of a GPU below which cuBLAS and cuDNN cannot allocate their buffers."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the CPU ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(sign in text for sign in _SIGNS):
        return True
    return any(sign in text for sign in _SIGNS_OF_A_FULL_GPU) and _is_nearly_full()


def _is_nearly_full() -> bool:
    """Return whether this process's current CUDA device has little memory left."""
    return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < LITTLE


def attempt(
    compute: Callable[[], T],
    ran_out: Callable[[Exception], bool] = is_out_of_memory,
    undo: Callable[[], object] = lambda: None,
) -> T | None:
    """Return the result of a computation; None if memory ran out, which is then released.

    Args:
        ran_out: Whether an error means that memory ran out; other errors are raised.
        undo: Drops references to tensors of the failed computation.
    """
    try:
        return compute()
    except Exception as error:
        if not ran_out(error):
            raise
    undo()  # outside of the `except` block, since the error's traceback holds the activations
    release_memory()
    return None


def release_memory() -> None:
    """Free the memory of a failed attempt; call it outside of the `except` block."""
    gc.collect()
    if (here := local_gpu()) is not None:
        here[1].release()


class RetryWatch:
    """Detects that a GPU's allocator keeps flushing its cache because memory is nearly full."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_reported = device, False
        self._before: int | None = None

    def report(self, num_steps: int) -> str:
        """Return a warning, once, if the cache was flushed as often as steps were run; else "".

        The first call only sets the baseline: the search for a smaller plan flushes the cache, too.
        """
        gpu = gpu_of(self._device)
        before, self._before = self._before, 0 if gpu is None else gpu.retries(self._device)
        num_flushes = 0 if before is None else self._before - before
        if self._is_reported or num_flushes < num_steps:
            return ""
        self._is_reported = True
        return (
            f"The GPU's memory is nearly full: in {num_steps} steps torch flushed its cache "
            f"{num_flushes} times, and waited for the GPU each time. A lower "
            "train.tokens_per_batch or train.gradient_checkpointing: true may be faster."
        )


def is_compile_error(error: BaseException) -> bool:
    """Return whether an error comes from the compiler or one of its kernels."""
    from torch._dynamo.exc import TorchDynamoException

    is_triton = type(error).__module__.partition(".")[0] == "triton" or "Triton Error" in str(error)
    return isinstance(error, TorchDynamoException) or is_triton


def one_line(error: BaseException) -> str:
    """Format an error as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:240]}"  # source and message
