"""Products of few rows with packed weights on a card: right, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.card.job import LIMITS, Job, Line, apart, judged, verdict
from peftkit.execution.out_of_memory import one_line
from peftkit.kernels import packed_product
from peftkit.kernels.gguf_blocks import TYPES
from peftkit.kernels.packed import PackedFormat, PackedWeight, pack_int8, unpack
from peftkit.quant.layers import import_bitsandbytes

ROWS = (1, 4, packed_product.MOST_ROWS)
"""Rows of x."""
CODED = {"int4": 128, "uint8": 128, "fp8": 128, "mxfp4": 32, "nvfp4": 16}
"""Columns per scale."""
HALVES = {**dict.fromkeys(TYPES, (0,)), "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2)}
HALVES |= {"q5_k": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "mxfp4_gguf": ()}
"""Bytes at which a block has float16 numbers."""
WEIGHTS_READ = 4
"""Different weights that are read in turn, because one may stay in the card's cache."""
REPEATS = 7


def weight_of(kind: str, size: int, seed: int) -> PackedWeight:
    """Return random codes (size, size) and scales of a kind, whose values are finite."""
    generator = torch.Generator().manual_seed(seed)
    shape = torch.Size((size, size))

    def random_bytes(*sizes: int) -> Tensor:
        return torch.randint(256, sizes, generator=generator, dtype=torch.uint8)

    if kind in TYPES:
        block = TYPES[kind]
        codes = random_bytes(size, size // block.values, block.num_bytes)
        for at in HALVES[kind]:
            half = torch.rand(codes.shape[:2], generator=generator).half() / 100
            codes[..., at : at + 2] = half[..., None].view(torch.uint8)
        if kind == "mxfp4_gguf":
            codes[..., 0] = 120
        form = PackedFormat(kind, shape, block.values)
        return PackedWeight(codes.flatten(1), (), form)
    if kind == "int8":
        values, scale = pack_int8(torch.randn(shape, generator=generator))
        return PackedWeight(values, (scale,), PackedFormat(kind, shape))
    block_size = CODED[kind]
    form = PackedFormat(kind, shape, block_size, 128 if kind == "fp8" else 1)
    codes = random_bytes(size, size if kind in ("uint8", "fp8") else size // 2)
    grid = (-(-size // form.rows), -(-size // block_size))
    if kind == "mxfp4":
        return PackedWeight(codes, (torch.full(grid, 120, dtype=torch.uint8),), form)
    if kind == "nvfp4":
        return PackedWeight(codes, (random_bytes(*grid) & 63, torch.tensor(0.01)), form)
    scale = torch.rand(grid, generator=generator) / 100
    if kind == "fp8":
        return PackedWeight(codes & 0xF7, (scale,), form)  # without NaN
    zero = random_bytes(*grid) & (15 if kind == "int4" else 255)
    return PackedWeight(codes, (scale.half(), zero), form)


def products(job: Job) -> Iterator[Line]:
    """Products of few rows: compared with float64, and timed with unpacking on the same weights."""
    figures = ("largest difference", "microseconds", "GB/s", "by unpacking", "well")
    yield "kind", "rows", *figures
    import_bitsandbytes()
    for kind in (*TYPES, *CODED, "int8"):
        weights = [
            PackedWeight(
                codes.to(job.device), tuple(scale.to(job.device) for scale in scales), form
            )
            for seed in range(WEIGHTS_READ)
            for codes, scales, form in (weight_of(kind, job.product_size, seed),)
        ]
        for rows in ROWS:
            try:
                yield kind, str(rows), *_line(job, weights, rows)
            except Exception as error:
                yield kind, str(rows), one_line(error)[:80], "", "", "", verdict(False)
    for fallback in packed_product.fallbacks():
        yield fallback.path, "", fallback.cause, "", "", "", verdict(False)


def _line(job: Job, weights: list[PackedWeight], rows: int) -> Line:
    x = torch.randn(rows, job.product_size, generator=torch.Generator().manual_seed(1))
    x = x.to(job.dtype).to(job.device)

    def unpacking(weight: PackedWeight) -> Tensor:
        return functional.linear(x, unpack(weight, job.dtype))

    def product(weight: PackedWeight) -> Tensor | None:
        return packed_product.product(x, None, weight, job.dtype, partial(unpacking, weight))

    found = product(weights[0])
    if found is None:
        return "the kernel does not run, or is wrong", "", "", "", verdict(False)
    exact = unpack(weights[0], job.dtype).cpu().double()
    difference, well = judged(apart(found, x.cpu().double() @ exact.T), LIMITS[job.dtype])
    seconds, others = (_seconds(job, run, weights) for run in (product, unpacking))
    codes, scales, _ = weights[0]
    size = sum(tensor.numel() * tensor.element_size() for tensor in (codes, *scales))
    times = (f"{seconds * 1e6:.1f}", f"{size / seconds / 1e9:.0f}", f"{others * 1e6:.1f}")
    return difference, *times, well


def _seconds(job: Job, run: Callable[[PackedWeight], object], weights: list[PackedWeight]) -> float:
    """Return the median seconds of a product, without launches from Python if it is recorded."""
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    graph = torch.cuda.CUDAGraph() if job.device.type == "cuda" else None
    if graph is not None:
        for weight in weights:
            run(weight)
        with torch.cuda.graph(graph):
            for weight in weights:
                run(weight)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        if graph is not None:
            graph.replay()
            torch.cuda.synchronize(job.device)
        else:
            for weight in weights:
                run(weight)
        times.append((time.perf_counter() - began) / len(weights))
    return median(times)
