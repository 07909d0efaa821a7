"""Packed weights in a model's blocks: how often they are unpacked, and what of them is held."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from peftkit.adapter import attach
from peftkit.forward import blocks as blocks_module
from peftkit.forward.blocks import Blocks
from peftkit.kernels import packed
from peftkit.kernels.packed import PackedFormat, PackedWeight, recomputing, unpack
from peftkit.methods.lora import LoRA
from peftkit.quant.layers import (
    empty_packed,
    import_bitsandbytes,
    keep_copies,
    pack,
    packed_tensors,
)
from peftkit.quant.quantize import quantize_model
from tests.helpers.adapters import gradients as gradients_of
from tests.helpers.families import FAMILIES
from tests.helpers.toy import same

IDS = torch.arange(36).remainder(23).view(3, 12) + 3
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}


def quantized(kind: str = "nf4", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES["llama"]().to(dtype).train()
    model.config.use_cache = False
    quantize_model(model, kind)
    adapter = attach(model, LoRA(rank=3))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


def loss(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, labels=IDS).loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return gradients_of(model, loss(model))


class Unpacked:
    """Counts how often each packed tensor is unpacked, and how many are held at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: Counter[int] = Counter()
        self.most, self._made = 0, []
        unpack = packed.unpack

        def counted(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
            made = unpack(weight, dtype)
            self.times[weight.data.data_ptr()] += 1
            self._made.append(StorageWeakRef(made.untyped_storage()))
            self.most = max(self.most, self.held)
            return made

        monkeypatch.setattr(packed, "unpack", counted)

    @property
    def held(self) -> int:
        return sum(not made.expired() for made in self._made)


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize(
    ("way", "times", "most"), [("keep", 2, 1), ("recompute", 2, 7), ("offload", 3, 1)]
)
def test_what_is_recomputed_unpacks_twice_and_holds_one_block(
    way, times, most, precision, monkeypatch
):
    under: AbstractContextManager[Any] = nullcontext()
    if precision == "autocast":
        under = torch.autocast("cpu", dtype=torch.bfloat16)
    model = quantized(dtype=FLOATS[precision])
    with under:
        gradients(model)  # the first pass finds out which layers read one input
        expected = gradients(model)
        Blocks(model).set_activations(way)
        unpacked = Unpacked(monkeypatch)
        result = loss(model)
        assert unpacked.held == 0
        model.zero_grad(set_to_none=True)
        result.backward()
    of_last = [data.data_ptr() for _, data, _ in packed_tensors(model.model.layers[1])]
    assert [unpacked.times[data] for data in of_last] == [times] * 7
    assert unpacked.most == most
    assert unpacked.held == 0
    actual = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert same(actual, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile's own
def test_compiled_code_is_not_the_same_for_what_is_recomputed():
    torch.compiler.reset()
    layer = nn.Sequential(nn.Linear(64, 32))
    quantize_model(layer, "nf4")
    layer.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 64, requires_grad=True)
    for under, expected in ((nullcontext(), []), (recomputing(), [(32, 64)]), (nullcontext(), [])):
        saved: list[Tensor] = []
        with under, saved_tensors_hooks(saved.append, lambda _: None):
            layer(x)
        assert [tuple(s.shape) for s in saved if s.shape == (32, 64)] == expected
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile's own
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "copies", "way"),
    [
        ("nf4", False, "keep"),
        ("nf4", True, "keep"),
        ("int8", False, "keep"),
        ("nf4", False, "recompute"),
    ],
)
def test_compiled_blocks_are_one_graph_and_save_no_unpacked_weight(kind, copies, way, monkeypatch):
    monkeypatch.setattr(blocks_module, "BACKEND", "aot_eager")
    torch.compiler.reset()
    counters.clear()
    model = quantized(kind)
    del model.model.layers[1:]
    assert bool(keep_copies(model, 1 << 30 if copies else 0)) == copies
    expected, blocks = gradients(model), Blocks(model)
    blocks.set_activations(way)
    blocks.compile()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    saved: list[Tensor] = []
    with saved_tensors_hooks(saved.append, lambda _: None):
        loss(model)
    assert saved
    if not copies:
        shapes = {tuple(packing.form.shape) for _, _, packing in packed_tensors(model)}
        shapes |= {shape[::-1] for shape in shapes}
        assert not [x for x in saved if x.is_floating_point() and tuple(x.shape) in shapes]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch.compiler.reset()


class Counting(TorchDispatchMode):
    """Records how many values each call of bitsandbytes is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = func(*args, **(kwargs or {}))
        if func.namespace == "bitsandbytes":
            self.sizes.append(values.numel())
        return values


STACK = torch.Size((160, 3072, 5120))
"""Gate and up of DeepSeek V2's experts: 2.5e9 values, more than an int32 counts."""


def stack_of(kind: str) -> PackedWeight:
    """Return a stack without values, as it is kept."""
    with torch.device("meta"):
        if kind == "nf4":
            codes, packing = empty_packed(STACK, kind, torch.bfloat16)
            return packing.weight(codes)
        codes, scale = torch.empty(STACK, dtype=torch.uint8), torch.empty(160, 24, 40)
        return PackedWeight(codes, (scale,), PackedFormat(kind, STACK, 128, 128))


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_bitsandbytes_is_never_asked_for_more_values_than_it_counts(kind):
    import_bitsandbytes()
    with Counting() as counting:
        values = unpack(stack_of(kind), torch.bfloat16)
    assert values.shape == STACK
    assert len(counting.sizes) > 8
    assert max(counting.sizes) < 2**31
    assert sum(size for size in counting.sizes if size > 2**26) == STACK.numel()


@pytest.mark.parametrize("kind", ["nf4", "fp4", "fp8"])
@pytest.mark.parametrize("shape", [(3, 16, 128), (5, 7, 192)])
def test_unpacking_in_chunks_is_exact(kind, shape, monkeypatch):
    import_bitsandbytes()
    weight = torch.randn(shape)
    if kind == "fp8":
        scales = (torch.rand(*shape[:-1], shape[-1] // 64),)
        codes = weight.to(torch.float8_e4m3fn).view(torch.uint8)
        stored = PackedWeight(codes, scales, PackedFormat(kind, weight.shape, 64))
    else:
        codes, packing = pack(weight, kind)
        stored = packing.weight(codes)
    expected = unpack(stored, torch.bfloat16)
    for module in ("packed", "block_scaled"):
        monkeypatch.setattr(f"peftkit.kernels.{module}.MAX_VALUES", 1 << 10)
        monkeypatch.setattr(f"peftkit.kernels.{module}.PART_VALUES", 1 << 10)
    with Counting() as counting:
        assert torch.equal(unpack(stored, torch.bfloat16), expected)
    assert max(counting.sizes) == 1 << 10
