"""glibc's memory: blocks that are freed, kept for the next step or given back."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Let glibc keep large blocks that are freed, for the next step asks for the same ones.

    By default it returns them to the system, and every step pays for fresh pages again: a fifth of
    a small model's step on a CPU. Lasts as long as the process; nothing where glibc is not.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def trim_malloc() -> None:
    """Return to the system the pages of free blocks that `keep_freed_memory` has kept.

    Blocks whose size differs from step to step leave holes between others, and the process grows: a
    small model's by a third in 250 steps. The next step pays for fresh pages once.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
