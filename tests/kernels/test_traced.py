"""Every autograd.Function of the package has eager gradients when the compiler traces it.

torch 2.11 loses the gradient of an output that `forward` changes in place. Functions that the
compiler cannot trace break the graph and run eagerly.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import peftkit
from peftkit.forward.blocks import COMPILER_WARNING
from peftkit.forward.fake_quantized import _StraightThrough
from peftkit.kernels.cross_entropy import ChunkedValues, chunked_cross_entropy
from peftkit.kernels.delta_rule import _UnitLowerSolve
from peftkit.kernels.device import _SmallLayer
from peftkit.kernels.fused import Gated, RMSNorm, Rotary
from peftkit.kernels.lora import Layer, Saved, _GroupedLoRALinear, grouped_lora_linear
from peftkit.kernels.packed import (
    PackedFormat,
    PackedLinear,
    PackedWeight,
    pack_int8,
    packed_linear,
)
from peftkit.kernels.stacked import PackedExperts, PackedStack, _Grouped
from peftkit.kernels.tiled import _Tiled, tiled
from peftkit.kernels.varlen import _Gathered, grid_of, into_grid

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings(f"ignore:{COMPILER_WARNING}"),
]
Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], list[Tensor]]
"""A function and its inputs that need gradients."""


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def lora(dropout: bool) -> Case:
    weights, bias, scales = [randn(7, 12), randn(5, 12)], randn(7), torch.full((6,), 2.0).double()
    layers = (Layer(None, 0, True), Layer(None, 0, False))

    def run(x: Tensor, a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor) -> tuple[Tensor, ...]:
        dropped = x * 0.5 if dropout else None
        frozen = (weights[0], bias, weights[1])
        a, b = torch.cat([a1, a2]).detach() * 2, (b1.detach(), b2.detach())
        return grouped_lora_linear(x, dropped, layers, frozen, a, scales, b, (a1, a2, b1, b2))

    return run, [randn(9, 12), randn(3, 12), randn(3, 12), randn(7, 3), randn(5, 3)]


def packed() -> Case:
    codes, scales = pack_int8(randn(5, 12))
    form = PackedFormat("int8", torch.Size((5, 12)))
    weight = PackedWeight(codes, (scales,), form)
    run = lambda x, bias: packed_linear(x, bias, weight, torch.float64)  # noqa: E731
    return run, [randn(2, 9, 12), randn(5)]


def experts() -> Case:
    codes, scales = pack_int8(randn(3, 5, 64))

    class Source:
        def fetch(
            self, experts: Sequence[int], backwards: bool
        ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
            for expert in reversed(experts) if backwards else experts:
                yield (expert,), codes[expert : expert + 1]

        def ends(self, offs: Tensor) -> list[int]:
            return [int(end) for end in offs]

    def product(x: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
        return x @ matrices[0]  # groups of one expert

    form = PackedFormat("int8", torch.Size((3, 5, 64)))
    stack = PackedStack(PackedExperts(form, torch.float64, Source(), (scales,)), flipped=True)
    return lambda x: _Grouped.apply(x, stack, product, torch.tensor([4, 4, 9])), [randn(9, 64)]


def tiles() -> Case:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return tiled(lambda part: torch.tanh(part @ weight), x, [weight], 4, draws=False)

    return run, [randn(2, 9, 6), randn(6, 5)]


def chunks() -> Case:
    targets = torch.arange(9) % 7

    def run(hidden: Tensor, head: Tensor) -> Tensor:
        settings: Any = {"trainable": (head,), "equal_weights": True, "chunk_rows": 8}
        product = lambda rows: functional.linear(rows, head)  # noqa: E731
        return chunked_cross_entropy(hidden, targets, product, **settings).sum()

    return run, [randn(9, 6), randn(7, 6)]


def in_grid() -> Case:
    grid = grid_of([[0, 1, 2], [0, 1, 3, 4]], (1, 8))
    return lambda x: into_grid(x, grid), [randn(1, 2, 8, 4)]


CASES: dict[type[torch.autograd.Function], Callable[[], Case]] = {
    _GroupedLoRALinear: lambda: lora(dropout=False),
    Saved: lambda: lora(dropout=True),
    PackedLinear: packed,
    _Grouped: experts,
    _Tiled: tiles,
    ChunkedValues: chunks,
    _Gathered: in_grid,
    RMSNorm: lambda: (lambda x: RMSNorm.apply(x, torch.ones(6).double(), 1e-5), [randn(4, 6)]),
    Gated: lambda: (lambda g, u: Gated.apply(g, u, "silu"), [randn(4, 6), randn(4, 6)]),
    Rotary: lambda: (
        lambda x: Rotary.apply(x, *torch.ones(2, 1, 5, 8).double()),
        [randn(3, 4, 5, 8)],
    ),
    _SmallLayer: lambda: (_SmallLayer.apply, [randn(9, 6), randn(2, 6), randn(6, 2)]),
    _UnitLowerSolve: lambda: (_UnitLowerSolve.apply, [randn(2, 8, 8), randn(2, 8, 3)]),
    _StraightThrough: lambda: (
        lambda x, a, b: _StraightThrough.apply(x, a, b, torch.ones(5, 6).double(), 0.5),
        [randn(4, 6), randn(3, 6), randn(5, 3)],
    ),
}


def test_every_function_of_the_package_has_a_case():
    root = Path(peftkit.__file__).parent
    functions = set()
    for path in root.rglob("*.py"):
        if "torch.autograd" in path.read_text():
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            members = vars(importlib.import_module(name)).values()
            functions |= {m for m in members if isinstance(m, type) and m.__module__ == name}
    assert {f for f in functions if issubclass(f, torch.autograd.Function)} == CASES.keys()


@pytest.mark.parametrize("function", CASES)
def test_traced_functions_have_eager_gradients(function):
    torch.manual_seed(0)
    run, inputs = CASES[function]()

    def gradients(run: Callable[..., Tensor | tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves)
        outs = (out,) if isinstance(out, Tensor) else out
        return torch.autograd.grad(sum(y.square().sum() for y in outs), leaves)

    torch.compiler.reset()
    expected = gradients(run)
    actual = gradients(torch.compile(run, backend="eager"))
    torch.compiler.reset()
    for wanted, found in zip(expected, actual, strict=True):
        assert wanted.any()
        torch.testing.assert_close(found, wanted)  # float64: the order of sums alone
