"""Memory that ran out, and blocks that do not compile: recognised, cleaned up after, reported."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from peftkit.data.pack import num_tokens
from peftkit.errors import RunError
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


TOO_LARGE = (
    "Lower data.max_length, set train.gradient_checkpointing: auto, or quantise the base "
    "(base.quantize: nf4)."
)


def too_large(
    row: Any, rows: Sequence[Any], fits: Callable[[Any], bool], *, fix: str = TOO_LARGE
) -> RunError:
    """Return the error for a row that does not fit by itself, saying how long a row may be.

    Args:
        rows: Others to try, of which the longest that fits is searched by bisection.
        fits: Tries a row.
    """
    asked = f"one row alone does not fit into memory: {getattr(row, 'source', 'row')}"
    length = num_tokens(row)
    by_length = {num_tokens(other): other for other in rows if 0 < num_tokens(other) < length}
    candidates = sorted(by_length)
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if fits(by_length[candidates[middle]]):
            low = middle + 1
        else:
            high = middle
    found = f"It has {length:,} tokens." if length else ""
    if low:
        found += f" Rows of {candidates[low - 1]:,} tokens would fit."
    elif candidates:
        found += f" Not even the shortest row, of {candidates[0]:,} tokens, would fit."
    return RunError(asked, found=found, fix=fix)


def is_compile_error(error: BaseException) -> bool:
    """Tell whether an error is of the compiler, or of a kernel of its, and not of the model."""
    from torch._dynamo.exc import TorchDynamoException

    of_triton = type(error).__module__.partition(".")[0] == "triton" or "Triton Error" in str(error)
    return isinstance(error, TorchDynamoException) or of_triton


def told(error: BaseException) -> str:
    """Return an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:240]}"  # whose fault, and what it was
