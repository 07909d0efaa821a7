"""This process's main memory: what it takes, and glibc's blocks, kept or given back.

Nothing here is needed: where the system has no such call (Windows), it is left out.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""
LARGE = 1 << 23
"""Bytes: of a weight rather than of hidden states."""


def keep_freed_memory(*, large_ones: bool = True) -> None:
    """Let glibc keep large blocks that are freed, for the next step asks for the same ones.

    By default it returns them to the system, and every step pays for fresh pages again: a fifth of
    a small model's step on a CPU. Lasts as long as the process; nothing where glibc is not.

    Args:
        large_ones: False gives blocks from LARGE on back when they are freed: weights that come and
            go leave holes that the next ones do not fit, until as much is held as all of them.
    """
    library = _libc()
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30 if large_ones else LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def trim_malloc() -> None:
    """Return to the system the pages of free blocks that `keep_freed_memory` has kept.

    Blocks whose size differs from step to step leave holes between others, and the process grows: a
    small model's by a third in 250 steps. The next step pays for fresh pages once.
    """
    library = _libc()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows: None names no library there
        return None


def resident_bytes() -> int:
    """Return the main memory that this process has in use now; the peak, or 0, where unknown."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_resident_bytes()
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return 1024 * int(lines["VmRSS"].split()[0])


def peak_resident_bytes() -> int:
    """Return the most main memory that this process has had in use; 0 where unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_bytes() -> int | None:
    """Return the main memory that this process may still take, by the system and its cgroup.

    None where the system does not say (macOS, Windows).
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = 1024 * int(lines.get("MemAvailable", "0 kB").split()[0])
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)
