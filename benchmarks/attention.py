"""Grouped attention beside torch's own on this CPU: milliseconds forward, and forward and backward.

python -m benchmarks.attention
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from peftkit.kernels.attention import grouped_attention, reference_attention

SHAPES = ((8, 128), (4, 256), (2, 512), (1, 1024))
"""Rows and length, 9 heads over 3 of keys, head size 64: SmolLM2's."""


def milliseconds(work: Callable[[], object], repeats: int = 9) -> float:
    """Return the median processor time of a call, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1e3 * median(times)


def main() -> None:
    """Print the table, on one thread: processor time says little about several."""
    torch.set_num_threads(1)
    print("rows x length   torch fwd  fwd+bwd   grouped fwd  fwd+bwd")
    for batch, length in SHAPES:
        q, k, v = (
            torch.randn(batch, length, heads, 64).bfloat16().transpose(1, 2).requires_grad_()
            for heads in (9, 3, 3)
        )
        grad = torch.randn(batch, 9, length, 64).bfloat16()

        def run(
            attend: Callable[..., Tensor],
            q: Tensor = q,
            k: Tensor = k,
            v: Tensor = v,
        ) -> Tensor:
            return attend(q, k, v, None, True, 0.125)

        figures = []
        for attend in (reference_attention, grouped_attention):
            figures.append(milliseconds(lambda attend=attend: run(attend)))
            figures.append(milliseconds(lambda attend=attend, g=grad: run(attend).backward(g)))
        print(f"{batch:4} x {length:<8}", *(f"{figure:10.2f}" for figure in figures))


if __name__ == "__main__":
    main()
