"""Memory that ran out, and blocks that do not compile: recognised, cleaned up after, reported."""

from __future__ import annotations

import gc

import torch

from peftkit.kernels.device import gpu_here

# RuntimeErrors that torch and the vendors' libraries raise when memory runs out
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def release_memory() -> None:
    """Free what a failed attempt left behind; call it outside of the `except` block."""
    gc.collect()
    if (here := gpu_here()) is not None:
        here[1].release()


def is_compile_error(error: BaseException) -> bool:
    """Tell whether an error is of the compiler, or of a kernel of its, and not of the model."""
    from torch._dynamo.exc import TorchDynamoException

    of_triton = type(error).__module__.partition(".")[0] == "triton" or "Triton Error" in str(error)
    return isinstance(error, TorchDynamoException) or of_triton


def one_line(error: BaseException) -> str:
    """Return an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:240]}"  # whose fault, and what it was
