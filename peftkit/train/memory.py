"""What to do when memory runs out: smaller micro-batches, then recomputed activations."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from peftkit.errors import PeftkitError, RunError

# RuntimeErrors that torch and the vendors' libraries raise when memory runs out
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def release_memory() -> None:
    """Give back what a failed attempt left behind; call it outside of the `except` block."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def keep_freed_memory() -> None:
    """Let glibc keep large blocks that are freed, for the next step asks for the same ones.

    By default it returns them to the system, and every step pays for fresh pages again: a fifth of
    a small model's step on a CPU. Lasts as long as the process; nothing where glibc is not.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


class Recompute:
    """Gradient checkpointing of a model's blocks, those that transformers marks for it.

    Set on the blocks themselves: transformers' own switch also makes the embeddings' output require
    a gradient, which costs the backward pass of all that lies below the lowest adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._blocks = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        self._before = [
            (m.gradient_checkpointing, getattr(m, "_gradient_checkpointing_func", None))
            for m in self._blocks
        ]
        self._name = type(model).__name__
        self.enabled = any(enabled for enabled, _ in self._before)

    @property
    def possible(self) -> bool:
        """Whether the model has such blocks."""
        return bool(self._blocks)

    def enable(self) -> None:
        """Keep no activations inside of blocks from here on.

        Raises:
            PeftkitError: The model has no such blocks.
        """
        if not self.possible:
            raise PeftkitError(
                "train.gradient_checkpointing: true is not possible here",
                found=f"{self._name} has no blocks marked for it.",
                fix="Set it to auto or false; a smaller train.batch_size also saves memory.",
            )
        function = functools.partial(checkpoint, use_reentrant=False)
        self._set([(True, function)] * len(self._blocks))
        self.enabled = True

    def disable(self) -> None:
        """Keep all activations from here on."""
        self._set([(False, function) for _, function in self._before])
        self.enabled = False

    def restore(self) -> None:
        """Leave the model as it was found."""
        self._set(self._before)

    def _set(self, values: Sequence[tuple[Any, Any]]) -> None:
        for block, (enabled, function) in zip(self._blocks, values, strict=True):
            block.gradient_checkpointing = enabled
            if function is not None:
                block._gradient_checkpointing_func = function


def too_large(row: Any, rows: Sequence[Any], fits: Callable[[Any], bool], *, fix: str) -> RunError:
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


def num_tokens(row: Any) -> int:
    """Return a row's length in tokens, 0 if it does not say."""
    return len(getattr(row, "input_ids", ()))
