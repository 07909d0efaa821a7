"""Completions over packed bases: the kernel reads codes, and no weight is unpacked for a token."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks import decode_bytes
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Request
from peftkit.inference.open_engine import generation_fallbacks
from peftkit.inference.sampling import Sampling
from peftkit.kernels import packed, packed_product
from peftkit.kernels.gguf_blocks import TYPES
from peftkit.kernels.packed import PackedFormat, PackedWeight, packed_linear
from peftkit.quant.layers import Packing, QuantizedLinear, import_bitsandbytes
from tests.helpers.generation import TOKENIZER
from tests.helpers.gguf_files import config_of_a_small_llama, random_rows
from tests.simulated_gpu.simulation import on_cpu, simulated
from tests.simulated_gpu.tensors import Card

KINDS = ("q4_k", "int4")
PROMPTS = [[7, 8, 9], [11, 12]]


def weight_of(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, Packing]:
    """Return random codes with their packing: of a GGUF file, or of GPTQ (int4)."""
    size = torch.Size(shape)
    if kind in TYPES:
        rows = torch.from_numpy(random_rows(kind, *shape, seed))
        return rows, Packing(PackedFormat(kind, size, TYPES[kind].values), torch.float32, ())
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (shape[0], shape[1] // 2), generator=generator).byte()
    scale = torch.rand(shape[0], shape[1] // 32, generator=generator) / 100
    zero = torch.randint(16, scale.shape, generator=generator).byte()
    return codes, Packing(PackedFormat(kind, size, 32), torch.float32, (scale.half(), zero))


def model_of(kind: str) -> Any:
    """Return a small Llama whose linear layers, the head too, are packed."""
    import_bitsandbytes()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of_a_small_llama()).eval()
    for number, (path, layer) in enumerate([*model.named_modules()]):
        if isinstance(layer, torch.nn.Linear):
            shape = (layer.out_features, layer.in_features)
            model.set_submodule(path, QuantizedLinear(*weight_of(kind, shape, number)))
    return model


def answers(model: Any) -> list[list[int]]:
    with CachedEngine(model, TOKENIZER) as engine:
        engine.ends = frozenset()
        running = [engine.submit(Request(ids, Sampling(6, 0.0), 0)) for ids in PROMPTS]
        engine.run()
        return [list(one.ids) for one in running]


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of weights in the order of their unpacking."""
    kinds, unpack = [], packed.unpack

    def counted(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        kinds.append(weight.form.kind)
        return unpack(weight, dtype)

    monkeypatch.setattr(packed, "unpack", counted)
    return kinds


@pytest.mark.parametrize("kind", KINDS)
def test_completions_read_the_codes_and_have_the_tokens_of_a_cpu(kind, unpacked):
    expected = answers(model_of(kind))
    with simulated() as card:
        model = model_of(kind).to("cuda")
        assert answers(model) == expected  # its first products are compared
        card.reset()
        unpacked.clear()
        assert answers(model) == expected
        layers = sum(isinstance(layer, QuantizedLinear) for layer in model.modules())
        assert card.operators["packed_product"] >= 2 * layers  # of prompts, and of a step
        assert not unpacked
        assert generation_fallbacks(model, TOKENIZER) == []


@pytest.mark.parametrize("problem", ["raises", "wrong"])
def test_a_kernel_that_fails_is_replaced_and_reported(problem, monkeypatch):
    expected = answers(model_of("int4"))
    broken = frozenset({"multiply"} if problem == "raises" else ())
    with simulated(Card(broken=broken)):
        if problem == "wrong":
            multiply, calls = packed_product.LAUNCHER._kernels.multiply, []

            def wrong(*args: Any) -> Tensor:
                calls.append(args)
                return multiply(*args).flip(-1)

            monkeypatch.setattr(packed_product.LAUNCHER._kernels, "multiply", wrong)
        model = model_of("int4").to("cuda")
        assert answers(model) == expected
        if problem == "raises":
            assert len(packed_product.LAUNCHER._kernels.launched) == 1
        else:
            tried = len(calls)
            assert answers(model) == expected
            assert len(calls) == tried
        (fallback,) = generation_fallbacks(model, TOKENIZER)
    text = "Failed to find C compiler" if problem == "raises" else "a result is off by"
    assert text in fallback.text
    assert "unpacks each packed weight for each token" in fallback.text


def test_products_of_many_rows_and_with_gradients_unpack(unpacked):
    codes, packing = weight_of("q8_0", (40, 64))

    def run(x: Tensor) -> None:
        packed_linear(x, None, packing.weight(codes.to("cuda")), torch.float32)

    most = packed_product.MOST_ROWS
    with simulated() as card:
        x = torch.randn(most + 1, 64, device="cuda")
        run(x)
        run(x[:most].requires_grad_())
        assert not card.operators["packed_product"]
        run(x[:most].detach())
        assert card.operators["packed_product"] == 1
    assert len(unpacked) == 3


def test_a_head_is_not_cut_into_slices(monkeypatch):
    codes, packing = weight_of("q6_k", (4096, 256))
    monkeypatch.setattr(packed, "SLICE_SIZE", 1 << 18)
    x = torch.randn(3, 256)
    expected = packed_linear(x, None, packing.weight(codes), torch.float32)
    with simulated() as card:
        here = packing.weight(codes.to("cuda"))
        for _ in range(2):
            card.reset()
            found = packed_linear(x.to("cuda"), None, here, torch.float32)
        assert card.operators["packed_product"] == 1
        assert not card.operators["unpack_gguf"]
        torch.testing.assert_close(on_cpu(found), expected)


@pytest.mark.needs_simulation  # tensors without data
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_moves_little_more_than_the_packed_weights(kind):
    """Of an 8B shape's blocks, with the head: rows of activations are counted as well."""
    import_bitsandbytes()
    size, moved = decode_bytes.counted("llama-3.1-8b", kind, 2, has_kernel=True)
    assert size < moved <= 1.1 * size
    _, before = decode_bytes.counted("llama-3.1-8b", kind, 2, has_kernel=False)
    assert before > 4 * size
