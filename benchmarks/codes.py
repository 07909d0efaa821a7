"""The time for dequantising a weight, by the layout of its codes, compared with nf4.

    python -m benchmarks.codes
    python -m benchmarks.codes --device cuda --dtype bf16

One matrix at a time into new memory; the best of several alternating passes over all layouts. On a
CPU this is processor time of one thread, which other load affects less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.report import heading, table, versions
from peftkit.base.published.checkpoint import Scheme, empty_packed
from peftkit.base.request import DTYPES
from peftkit.quant.layers import pack

FORMS = {
    "int4, groups of 128 (GPTQ, w4a16)": Scheme("packed", 4, 128),
    "int4 with zeros, groups of 128 (AWQ)": Scheme("awq", 4, 128, has_zeros=True),
    "uint8, groups of 128 (GPTQ in 8 bits)": Scheme("gptq", 8, 128),
    "int8, by the row (w8a8)": Scheme("int8", 8),
    "fp8, blocks of 128 x 128": Scheme("fp8", 8, block=(128, 128)),
    "fp8, by the row": Scheme("fp8", 8, block=(1, 1 << 20)),
    "mxfp4": Scheme("mxfp4", 4, 32),
    "nvfp4": Scheme("nvfp4", 4, 16),
}


Ways = dict[str, tuple[float, Callable[[], Tensor]]]


def ways(size: int, dtype: torch.dtype, device: str) -> Ways:
    """Return the bits per weight and the dequantising function of each layout."""
    weight = torch.randn(size, size, dtype=dtype, device=device)
    packed, packing = pack(weight, "nf4")
    bits = 8 * packing.num_bytes(packed) / weight.numel()
    found: Ways = {"nf4, double quantised": (bits, lambda: packing(packed))}
    for name, scheme in FORMS.items():
        with torch.device(device):
            packed, packing = empty_packed((size, size), scheme, dtype)
        for tensor in (packed, *packing.scales):
            tensor.data.fill_(1)
        found[name] = 8 * packing.num_bytes(packed) / size**2, partial(packing, packed)
    return found


def main() -> None:
    """Measure all forms and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the matrix")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    measured = ways(args.size, DTYPES[args.dtype], args.device)
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    torch.set_num_threads(1)
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(args.repeats + 1):
        for name, (_, run) in measured.items():
            start = clock()
            run()
            if args.device != "cpu":
                torch.cuda.synchronize()
            best[name] = min(best[name], clock() - start)
    fastest = next(iter(best.values()))
    print(heading({"here": versions()}))
    print(f"{args.size} x {args.size} to {args.dtype} on {args.device}")
    rows = [
        (name, f"{measured[name][0]:.2f}", f"{1e3 * seconds:.2f}", f"{seconds / fastest:.2f}")
        for name, seconds in best.items()
    ]
    print(table(("form", "bits a weight", "ms", "times nf4"), rows))


if __name__ == "__main__":
    main()
