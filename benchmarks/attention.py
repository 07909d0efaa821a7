"""peftkit's attention compared with torch's on this CPU: milliseconds per layer and direction.

    python -m benchmarks.attention

Processor time of one thread, which is more stable than wall time on a shared machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.report import heading, table
from peftkit.kernels.attention import grouped_attention, reference_attention
from peftkit.kernels.device import keep_freed_memory

SHAPES = ((8, 128), (4, 256), (2, 512), (1, 1024))
"""Rows and length; 9 heads of 64 over 3 of keys, as SmolLM2's, bf16, causal."""

WAYS: dict[str, Callable[..., Tensor]] = {
    "torch's": reference_attention,
    "plain products": grouped_attention,
}


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the median processor time of a call, after a warm-up call."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1e3 * median(times)


def measure(batch: int, length: int) -> list[str]:
    """Return a line of the table."""
    inputs = [
        torch.randn(batch, length, heads, 64).bfloat16().transpose(1, 2).requires_grad_()
        for heads in (9, 3, 3)
    ]
    grad = torch.randn(batch, 9, length, 64).bfloat16()
    figures = []
    for attend in WAYS.values():

        def forward(attend: Callable[..., Tensor] = attend) -> Tensor:
            return attend(*inputs, None, True, 0.125)

        figures += [milliseconds(forward), milliseconds(lambda: forward().backward(grad))]
    return [f"{batch} x {length:,}", *(f"{figure:.1f}" for figure in figures)]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    keep_freed_memory()
    columns = ["rows x length", *(f"{way}{both}" for way in WAYS for both in ("", ", both ways"))]
    print(heading({}))
    print(table(columns, [measure(*shape) for shape in SHAPES]))


if __name__ == "__main__":
    main()
