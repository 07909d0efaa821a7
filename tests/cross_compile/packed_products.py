"""Products of few rows with weights of every packed kind: their numbers and their machine code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from peftkit.kernels import block_scaled
from peftkit.kernels import packed_product_kernels as kernels
from peftkit.kernels.gguf_blocks import TYPES
from peftkit.kernels.packed import PackedFormat, PackedWeight, pack_int8, unpack
from peftkit.quant.layers import import_bitsandbytes
from tests.cross_compile import interpreter, machine_code  # noqa: F401
from tests.helpers.gguf_files import random_rows

ROWS = 5
"""Rows of each weight, which end within a program's tile."""


def _codes(rows: int, width: int, per_byte: int) -> Tensor:
    return torch.randint(256, (rows, width // per_byte), dtype=torch.uint8)


def weights() -> Iterator[tuple[str, PackedWeight]]:
    """Yield a name and a weight of each kind; rows and blocks end within a program's tile."""
    for kind, block in TYPES.items():
        rows, width = ROWS, 2 * block.values if block.values == 256 else 9 * 32
        data = torch.from_numpy(random_rows(kind, rows, width))
        form = PackedFormat(kind, torch.Size((rows, width)), block.values)
        yield kind, PackedWeight(data, (), form)

    def coded(
        kind: str, shape: tuple[int, int], block: int, *scales: Tensor, height: int = 1
    ) -> PackedWeight:
        per_byte = 1 if kind in ("uint8", "fp8") else 2
        codes = _codes(*shape, per_byte)
        if kind == "fp8":
            codes[codes & 127 == 127] = 0  # NaN, which loading refuses
        return PackedWeight(codes, scales, PackedFormat(kind, torch.Size(shape), block, height))

    for kind, most in (("int4", 16), ("uint8", 256)):
        for block, width in ((128, 384), (48, 342), (342, 342)):
            grid = (ROWS, -(-width // block))
            zero = torch.randint(most, grid, dtype=torch.uint8)
            yield f"{kind} {block}", coded(kind, (ROWS, width), block, torch.rand(grid).half())
            scale = torch.rand(grid)
            yield f"{kind} {block} zeros", coded(kind, (ROWS, width), block, scale, zero)
        places = torch.randperm(384).int()
        scale, zero = torch.rand(ROWS, 3).bfloat16(), torch.randint(most, (ROWS, 3)).byte()
        yield f"{kind} sorted", coded(kind, (ROWS, 384), 128, scale, zero, places)
        yield f"{kind} sorted, no zeros", coded(kind, (ROWS, 384), 128, scale, places)
    yield "fp8 rows", coded("fp8", (ROWS, 341), 341, torch.rand(ROWS, 1))
    yield "fp8 tensor", coded("fp8", (ROWS, 341), 341, torch.rand(1, 1), height=ROWS)
    yield "fp8 blocks", coded("fp8", (ROWS, 341), 128, torch.rand(3, 3), height=2)
    exponents = torch.randint(100, 128, (ROWS, 11)).byte()
    exponents[0, :2] = torch.tensor([0, 1])
    yield "mxfp4", coded("mxfp4", (ROWS, 352), 32, exponents)
    scale, factor = torch.randint(127, (ROWS, 22)).byte(), torch.tensor(0.37)
    yield "nvfp4", coded("nvfp4", (ROWS, 352), 16, scale, factor)
    yield "nvfp4 divided", coded("nvfp4", (ROWS, 352), 16, scale, factor.view(1))
    values, scale = pack_int8(torch.randn(ROWS, 341))
    yield "int8", PackedWeight(values, (scale,), PackedFormat("int8", values.shape))


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return a product by the kernels."""
    packed, scales, form = weight
    return kernels.multiply(x, packed, scales, form.kind, form.shape, form.block, form.rows, bias)


def wrong_values(weight: PackedWeight, dtype: torch.dtype) -> int:
    """Return how many values that unit vectors select differ from the unpacked weight."""
    expected = unpack(weight, dtype).T
    units = torch.eye(weight.form.shape[1], dtype=dtype)
    with mock.patch.multiple(kernels, MOST_TOKENS=128, SUMS=8 * 128):  # few programs: faster
        found = torch.cat([product(some, weight) for some in units.split(128)])
    return int((found != expected).sum())


def error(weight: PackedWeight, dtype: torch.dtype, tokens: int) -> float:
    """Return the largest relative difference of a product from that in float64."""
    rows, width = weight.form.shape
    x, bias = torch.randn(tokens, width).to(dtype), torch.randn(rows).to(dtype)
    exact = unpack(weight, dtype).double()
    expected = torch.nn.functional.linear(x.double(), exact, bias.double())
    found = product(x, weight, bias)
    assert found.dtype == dtype
    return float((found.double() - expected).abs().max() / expected.abs().max())


TOKENS = {torch.float32: 1, torch.bfloat16: 6, torch.float16: 3}
"""Rows of x of the products in each dtype."""


def compared() -> dict[str, tuple[int, float]]:
    """Return wrong values and the error by kind and dtype; under TRITON_INTERPRET=1."""
    import_bitsandbytes()
    torch.manual_seed(0)
    found = {}
    for number, (name, weight) in enumerate(weights()):
        # one program for all columns of a row, or one for each tile, whose sums are added
        kernels.PROGRAMS = 1 if number % 2 else 1 << 20
        wrong = sum(wrong_values(weight, dtype) for dtype in (torch.float32, torch.bfloat16))
        dtype = list(TOKENS)[number % len(TOKENS)]
        found[f"{name} {str(dtype).removeprefix('torch.')}"] = (
            wrong,
            error(weight, dtype, TOKENS[dtype]),
        )
    return found


KINDS = (*TYPES, *block_scaled.KINDS, "int8")


def compiled(card: int, dtype: str) -> list[dict[str, int]]:
    """Compile every kernel for a card; return its registers and the bytes that they spill to."""
    numbers = ("tokens", "rows", "width", "block", "height", "parts", "part_width")
    pointers = {"packed": "*u8", "scales": "*fp32", "zeros": "*u8", "factor": "*fp32"}
    pointers |= dict.fromkeys(("x", "bias", "out"), f"*{dtype}")
    found = []
    for kind in KINDS:
        for tokens in (1, kernels.MOST_TOKENS):
            block = {"nvfp4": 16, "mxfp4": 32}.get(kind, 128)
            factor = torch.ones(1) if kind == "nvfp4" else None
            fixed = kernels.constants(kind, 4096, block, tokens, factor)
            fixed |= {"height": 1, "parts": 1}  # a launch specialises ones
            fixed |= {"bias": None} if tokens == 1 else {}
            fixed |= {} if kind == "nvfp4" else {"factor": None}
            fixed |= {"scales": None, "zeros": None} if kind in TYPES else {}
            own = {"packed": "*i8"} if kind == "int8" else {}
            own |= {"scales": "*u8"} if kind in ("mxfp4", "nvfp4") else {}
            types = {**dict.fromkeys(numbers, "i32"), **pointers, **own}
            types |= dict.fromkeys(fixed, "constexpr")
            found.append(_resources(kernels.product_kernel, types, fixed, card))
    types = {"sums": "*fp32", "out": f"*{dtype}", "number": "i32", "parts": "i32"}
    fixed = {"SIZE": kernels.SUM_SIZE}
    types |= dict.fromkeys(fixed, "constexpr")
    return [*found, _resources(kernels.sum_kernel, types, fixed, card)]


def _resources(
    kernel: Any, types: dict[str, str], fixed: dict[str, Any], card: int
) -> dict[str, int]:
    arrays = [name for name in kernel.arg_names if name == "width" or "*" in types[name]]
    made = machine_code.compiled(kernel, types, fixed, card, aligned=arrays, enable_fp_fusion=False)
    assert ".ftz" not in made.asm["ptx"]  # e4m3 and e2m1 values pass through subnormal ones
    return machine_code.resources(made)
