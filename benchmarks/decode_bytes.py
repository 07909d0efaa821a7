"""Bytes that a GPU moves to decode a token with packed weights, by unpacking and by the product.

    python -m benchmarks.decode_bytes
    python -m benchmarks.decode_bytes --kinds q4_k int4 --model qwen3-8b

No GPU is needed, and none has run the product: the simulated card of tests/simulated_gpu counts the
arguments and results of each operator, on tensors without data. Models of two and three blocks are
counted; the difference is the cost of each further block. A lower bound of a token's time is its
bytes by 85 % of the bandwidth of an RTX 4090; launches and arithmetic are not included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import shapes
from benchmarks.report import table
from benchmarks.simulate import OF_BANDWIDTH, RATES, Counting, without_data
from peftkit.kernels import packed_product
from peftkit.kernels.fused import Launcher
from peftkit.kernels.gguf_blocks import TYPES, row_bytes
from peftkit.kernels.packed import PackedFormat
from peftkit.quant.layers import Packing, QuantizedLinear, import_bitsandbytes
from tests.simulated_gpu.simulation import simulated

KINDS = ("q4_k", "q6_k", "q8_0", "int4", "uint8", "fp8", "mxfp4")
GROUP = {"fp8": 128, "mxfp4": 32}
"""Columns per scale; 128 of int4 and uint8, with zeros: GPTQ and AWQ."""
CARD = "RTX 4090"


def packed_layer(layer: nn.Linear, kind: str) -> QuantizedLinear:
    """Return a layer with the codes and scales of a kind, without values."""
    rows, width = layer.weight.shape
    device, scales = layer.weight.device, list[Tensor]()
    block = TYPES[kind].values if kind in TYPES else GROUP.get(kind, 128)
    height = 128 if kind == "fp8" else 1
    if kind in TYPES:
        num_bytes = row_bytes(kind, width)
    else:
        num_bytes = width if kind in ("uint8", "fp8") else width // 2
        grid = (-(-rows // height), -(-width // block))
        dtype = {"mxfp4": torch.uint8, "fp8": torch.float32}.get(kind, torch.float16)
        scales.append(torch.empty(grid, dtype=dtype, device=device))
        if kind in ("int4", "uint8"):
            scales.append(torch.empty(grid, dtype=torch.uint8, device=device))
    codes = torch.empty(rows, num_bytes, dtype=torch.uint8, device=device)
    form = PackedFormat(kind, layer.weight.shape, block, height)
    return QuantizedLinear(codes, Packing(form, torch.bfloat16, tuple(scales)))


def pack(module: nn.Module, kind: str) -> int:
    """Pack the linear layers of a module; return the bytes of codes and scales."""
    total = 0
    for path, layer in [*module.named_modules()]:
        if isinstance(layer, nn.Linear):
            packed = packed_layer(layer, kind)
            module.set_submodule(path, packed)
            total += packed.packing.num_bytes(packed.packed)
    return total


def counted(model: str, kind: str, layers: int, *, has_kernel: bool) -> tuple[int, float]:
    """Return the bytes of the packed weights, and the bytes that a token's operators move."""
    counting, sizes = Counting(16), list[int]()
    with without_data(), simulated(kernels=lambda: counting):
        if not has_kernel:
            packed_product.LAUNCHER = Launcher(None)  # the simulation restores it
        built: Any = shapes.build(
            shapes.SHAPES[model],
            dtype=torch.bfloat16,
            device=torch.device("cuda", 0),
            each_block=lambda block: sizes.append(pack(block, kind)),
            num_hidden_layers=layers,
        )
        sizes.append(pack(built, kind))  # the head
        ids = torch.ones(1, 1, dtype=torch.long, device="cuda")
        with torch.no_grad():
            counting.operators.clear()
            built.eval()(input_ids=ids, use_cache=False)
    return sum(sizes), sum(count.bytes for count in counting.operators.values())


def whole(model: str, kind: str, *, has_kernel: bool) -> tuple[float, float]:
    """Return the same for all blocks of a model."""
    few, more = (counted(model, kind, layers, has_kernel=has_kernel) for layers in (2, 3))
    others = shapes.SHAPES[model].settings["num_hidden_layers"] - 2
    size, moved = (a + others * (b - a) for a, b in zip(few, more, strict=True))
    return size, moved


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", choices=tuple(shapes.LARGE), default="llama-3.1-8b")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args(words)
    import_bitsandbytes()
    lines = []
    for kind in args.kinds:
        (size, product), (_, unpacking) = (
            whole(args.model, kind, has_kernel=has_kernel) for has_kernel in (True, False)
        )
        rate = OF_BANDWIDTH * RATES[CARD][1]
        figures = [f"{number / 1e9:.2f}" for number in (size, product, unpacking)]
        speeds = [f"{rate / moved:.0f}" for moved in (product, unpacking)]
        lines.append([kind, *figures, *speeds])
    heads = ("packed GB", "product", "unpacking", f"tokens/s, {CARD}", "unpacking")
    print(table(("kind", *heads), lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
