"""Kernels in Triton, where there is no GPU: their machine code, and their numbers.

Needs the `triton` package (the extra `gpu-tests`), which brings NVIDIA's assembler. Each test runs
a program of its own, for Triton reads once whether it interprets.
"""

from importlib.util import find_spec

import pytest

from tests.helpers.gpu_code import CARDS, MOST_REGISTERS, output_of

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton: pip install peftkit[gpu-tests]"
)

COMPILED = """
import json, sys
from peftkit.kernels import triton_kernels
from peftkit.kernels.gguf_blocks import TYPES
from tests.cross_compile.machine_code import compiled, resources

kernels = {
    triton_kernels.gated_kernel: ("gate", "up", "out"),
    triton_kernels.gated_backward_kernel: ("grad", "gate", "up", "grad_gate", "grad_up"),
}
asked = [
    (kernel, pointers, {"number": "i32"}, {"KIND": kind, "SIZE": triton_kernels.BLOCK})
    for kernel, pointers in kernels.items()
    for kind in triton_kernels.NUMBERS.values()
]
sizes = [f"{array}_{part}" for array in ("x", "out") for part in ("row", "head", "token")]
numbers = dict.fromkeys(("heads", "length", *sizes, "cos_row"), "i32")
for half, padded in ((32, 32), (40, 64), (64, 64), (128, 128)):
    for back in (False, True):
        fixed = {"HALF": half, "PADDED": padded, "TOKENS": 512 // padded, "BACK": back}
        pointers = ("x", "cos", "sin", "out")
        asked.append((triton_kernels.rotary_kernel, pointers, numbers, fixed))
for kind, block in TYPES.items():
    fixed = {"KIND": kind, **triton_kernels.sizes_of(kind, block.values, block.num_bytes)}
    others = {"packed": "*u8", "number": "i32"}
    asked.append((triton_kernels.unpack_kernel, ("out",), others, fixed))
floats = dict.fromkeys(("nested", "levels_of_absmax", "offset", "levels"), "*fp32")
for is_nested in (False, True):
    fixed = {"IS_NESTED": is_nested, "VALUES": 64, "NESTED_BLOCK": 256, "BLOCKS": 16}
    others = {"codes": "*u8", "absmax": "*u8" if is_nested else "*fp32", **floats, "number": "i32"}
    asked.append((triton_kernels.unpack_4bit_kernel, ("out",), others, fixed))
found = []
for kernel, pointers, numbers, fixed in asked:
    types = {name: "*" + sys.argv[2] for name in pointers} | numbers
    unpacks = kernel.__name__.startswith("unpack")
    aligned = [name for name in ("packed", "codes", "absmax", "out") if name in types] * unpacks
    how = {"aligned": aligned, "enable_fp_fusion": not unpacks}
    made = compiled(kernel, types, fixed, int(sys.argv[1]), **how)
    assert not unpacks or "fma" not in made.asm["ptx"]
    found.append(resources(made))
print(json.dumps(found))
"""

INTERPRETED = """
import json
import torch
from peftkit.kernels import triton_kernels
from peftkit.kernels.fused import ACTIVATIONS, Rotary

worst = {}
for name, function in ACTIVATIONS.items():
    for shape in ((1,), (3, 341), (2, 1024)):
        gate, up, grad = (3 * torch.randn(shape) for _ in range(3))
        pair = [x.clone().requires_grad_() for x in (gate, up)]
        expected = function(pair[0]) * pair[1]
        wanted = [expected, *torch.autograd.grad(expected, pair, grad)]
        made = [triton_kernels.gated(gate, up, name)]
        made += triton_kernels.gated_backward(grad, gate, up, name)
        errors = [float((a - b.detach()).abs().max()) for a, b in zip(made, wanted)]
        worst[f"{name} {shape}"] = max(errors)
for shape in ((1, 2, 3, 8), (2, 3, 37, 80), (2, 1, 16, 64)):
    rows, heads, length, size = shape
    x, grad = torch.randn(2, rows, length, heads, size).transpose(2, 3).unbind(0)
    for of_each in (1, rows):
        angles, made = torch.randn(2, of_each, length, size), []
        own = x.clone(memory_format=torch.preserve_format).requires_grad_()
        expected = Rotary.apply(own, *angles)
        wanted = [expected, *torch.autograd.grad(expected, own, grad)]
        for given, back in ((x, False), (grad, True)):
            made.append(torch.empty_like(given))
            triton_kernels.rotate(given, *angles, made[-1], back)
        errors = [float((a - b.detach()).abs().max()) for a, b in zip(made, wanted)]
        worst[f"rotation {shape} {of_each}"] = max(errors)
print(json.dumps(worst))
"""


BLOCKS = """
import json
import torch
from peftkit.kernels import triton_kernels
from peftkit.kernels.gguf_blocks import TYPES, unpack_gguf
from tests.helpers.gguf_files import bits, blocks_of_all_kinds

differ = {}
for kind, rows in blocks_of_all_kinds():
    shape = (rows.numel() // TYPES[kind].num_bytes, TYPES[kind].values)
    for dtype in (torch.float32, torch.float16):
        own = triton_kernels.unpack(torch.empty(shape, dtype=dtype), rows.view(shape[0], -1), kind)
        expected = unpack_gguf(rows, kind, shape, dtype)
        wrong = int((bits(own.float()) != bits(expected.float())).sum())
        differ[kind] = differ.get(kind, 0) + wrong
print(json.dumps(differ))
"""


FOUR_BITS = """
import json
import torch
from peftkit.kernels import packed, triton_kernels
from peftkit.quant.layers import import_bitsandbytes, pack
from tests.helpers.gguf_files import bits

import_bitsandbytes()
torch.manual_seed(0)
differ = {}
for kind in ("nf4", "fp4"):
    levels = packed._levels(kind, torch.device("cpu"))
    assert len(levels) == 16 and len(levels.unique()) >= 15 and levels.abs().max() == 1
    for shape in ((1, 5), (3, 64), (7, 191), (130, 384)):
        for double_quant in (False, True):
            codes, packing = pack(torch.randn(shape), kind, double_quant=double_quant)
            wanted, scales = packing.weight(codes), packing.scales
            for dtype in (torch.float32, torch.float16):
                out = torch.full((scales[0].numel(), 64), torch.nan, dtype=dtype)
                triton_kernels.unpack_4bit(out, codes, scales, levels, packed.NESTED_BLOCK)
                found = out.flatten()[: shape[0] * shape[1]].view(shape).float()
                wrong = int((bits(found) != bits(packed.unpack(wanted, dtype).float())).sum())
                differ[f"{kind} {shape} {double_quant} {dtype}"] = wrong
print(json.dumps(differ))
"""


GRIDS = """
import json
import torch
from peftkit.kernels import triton_kernels

grids = []

class Noted:
    def __getitem__(self, grid):
        grids.append(grid)
        return lambda *args, **more: None

triton_kernels.rotary_kernel = Noted()
x = torch.empty(4096, 32, 3, 64, device="meta")
triton_kernels.rotate(x, *torch.empty(2, 1, 3, 64, device="meta"), torch.empty_like(x), False)
print(json.dumps(grids))
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("card", CARDS)
def test_machine_code_keeps_all_in_registers(card, dtype, tmp_path):
    if card == 75 and dtype == "bf16":
        return  # a T4 has no bfloat16
    found = output_of(COMPILED, str(card), dtype, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 6 + 8 + 13 + 2
    for used in found:
        assert used["STACK"] == used["LOCAL"] == 0
        assert 0 < used["REG"] <= MOST_REGISTERS


def test_values_in_4_bits_have_the_bits_of_bitsandbytes():
    differ = output_of(FOUR_BITS, TRITON_INTERPRET="1")
    assert len(differ) == 2 * 4 * 2 * 2
    assert not any(differ.values()), differ


def test_numbers_are_those_of_torch():
    worst = output_of(INTERPRETED, TRITON_INTERPRET="1")
    assert len(worst) == 9 + 5
    assert max(worst.values()) < 1e-4  # float32: of values up to a hundred


def test_blocks_of_gguf_files_are_unpacked_to_the_bit():
    differ = output_of(BLOCKS, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")
    assert len(differ) == 13
    assert not any(differ.values())


def test_rows_times_heads_may_be_more_than_a_second_axis_takes():
    ((along, *others),) = output_of(GRIDS)
    assert along == 4096 * 32
    assert all(size <= 65_535 for size in others)


PRODUCTS = """
import json, sys
from tests.cross_compile.packed_products import compared, compiled
print(json.dumps(compiled(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else compared()))
"""
MOST_PRODUCT_REGISTERS = 128
"""Of a thread: with more, fewer than four programs, which read 32 rows, run on a multiprocessor."""


@pytest.mark.parametrize("card", CARDS)
def test_products_with_packed_weights_keep_all_in_registers(card, tmp_path):
    dtype = "fp16" if card == 75 else "bf16"
    found = output_of(PRODUCTS, str(card), dtype, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 2 * (13 + 6) + 1
    for used in found:
        assert used["STACK"] == used["LOCAL"] == 0
        assert 0 < used["REG"] <= MOST_PRODUCT_REGISTERS


def test_products_multiply_the_unpacked_weights_to_the_bit():
    found = output_of(PRODUCTS, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")
    assert len(found) == 13 + 2 * 8 + 7
    assert not {name: wrong for name, (wrong, _) in found.items() if wrong}
    rounded = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-11}  # once, at the end
    for name, (_, error) in found.items():
        assert error <= rounded[name.split()[-1]], name
