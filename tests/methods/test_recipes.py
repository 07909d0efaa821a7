"""Inputs of LoRA layers that the backward pass computes again: the same bits, less memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from peftkit.adapter import Adapter, attach, group_modules, ungroup_modules
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.blocks import Blocks
from peftkit.forward.fused import fused_modules
from peftkit.kernels import fused
from peftkit.kernels.fused import gated_product, recipe_of, rms_norm, saving_results
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.quant.quantize import quantize_model
from peftkit.train.fitting import ActivationBytes, saved_by
from tests.helpers.adapters import perturb
from tests.helpers.families import ARCHITECTURES

IDS = torch.arange(36).remainder(23).view(3, 12) + 3
ALL = ("q", "k", "v", "o", "gate", "up", "down")
ON_GPU = ExecutionPlan(device="cuda")


def adapted(method: LoRA, dtype: torch.dtype, quantize: str = "none", act: str = "") -> Adapter:
    """Return a tiny Llama with an adapter that does something."""
    torch.manual_seed(0)
    model: Any = ARCHITECTURES["llama"]().to(dtype)
    if quantize != "none":
        quantize_model(model, quantize, double_quant=True, compute_dtype=dtype)
    for layer in model.model.layers if act else ():
        layer.mlp.act_fn = ACT2FN[act]
    adapter = attach(model.train(), method)
    perturb(adapter.parameters(), seed=1)
    return adapter


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    group_modules(model)
    try:
        with fused_modules(model):
            yield
    finally:
        ungroup_modules(model)


def loss_of(adapter: Adapter) -> Tensor:
    torch.manual_seed(3)  # dropout
    loss: Tensor = adapter.model(input_ids=IDS, labels=IDS, use_cache=False).loss
    return loss


def gradients(adapter: Adapter) -> list[Tensor]:
    loss = loss_of(adapter)
    return [loss.detach(), *torch.autograd.grad(loss, list(adapter.parameters()))]


def saved(adapter: Adapter) -> ActivationBytes:
    blocks = Blocks(adapter.model, ON_GPU)
    return saved_by(lambda: loss_of(adapter), blocks.blocks, blocks.feed_forward)


@pytest.mark.parametrize(
    ("act", "dtype", "quantize", "dropout", "targets", "num_spared"),
    [
        ("silu", torch.bfloat16, "nf4", 0.0, ALL, 2 * 32 + 64),
        ("silu", torch.float32, "none", 0.0, ALL, 2 * 32 + 64),
        ("gelu", torch.float32, "int8", 0.0, ALL, 2 * 32 + 64),
        ("gelu_pytorch_tanh", torch.bfloat16, "none", 0.0, ALL, 2 * 32 + 64),
        ("silu", torch.bfloat16, "nf4", 0.0, ("q", "up"), 2 * 32),  # down saves no input
        ("silu", torch.bfloat16, "nf4", 0.0, ("down",), 64),
        ("silu", torch.float32, "none", 0.2, ALL, 0),  # A reads what dropout left
        ("relu", torch.float32, "none", 0.0, ALL, 2 * 32),  # no kernel computes this activation
    ],
)
def test_gradients_have_the_same_bits_and_the_inputs_are_not_saved(
    act, dtype, quantize, dropout, targets, num_spared
):
    adapter = adapted(LoRA(rank=3, dropout=dropout, targets=targets), dtype, quantize, act)
    with prepared(adapter.model):
        found, less = gradients(adapter), saved(adapter)
        with saving_results():
            expected, more = gradients(adapter), saved(adapter)
    assert all(map(torch.equal, found, expected))
    # in the first block, results below the lowest adapter need no gradient
    first = 0 if targets == ("down",) else max(num_spared - 32, 0)
    spared = [n * IDS.numel() * dtype.itemsize for n in (first, num_spared)]
    assert list(less.computed) == spared
    assert more.needed("keep") - less.needed("keep") == sum(less.computed)
    for way in ("recompute", "offload"):
        assert more.needed(way) == less.needed(way)


@pytest.mark.filterwarnings("default")  # Dynamo reads .grad of tensors that are no leaves
def test_a_compiled_layer_saves_an_input_from_outside():
    """The encoder's last norm runs outside of the compiled blocks that read its result."""
    adapter = adapted(LoRA(rank=3, targets=("down",)), torch.float32)
    layer = adapter.model.model.layers[0].mlp.down_proj
    source = torch.randn(5, 64, requires_grad=True)

    def gradients_by(apply):
        x = rms_norm(source, torch.ones(64), 1e-6)
        assert recipe_of(x) is not None
        return torch.autograd.grad(apply(x).square().sum(), [source, *adapter.parameters()][:3])

    with prepared(adapter.model):
        expected = gradients_by(layer)
        found = gradients_by(torch.compile(layer, backend="aot_eager"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_recomputed_blocks_save_the_inputs(activations, monkeypatch):
    adapter, used = adapted(LoRA(rank=3, targets=ALL), torch.float32), []
    monkeypatch.setattr(fused, "recipe_of", lambda x: used.append(x))
    monkeypatch.setattr("peftkit.methods.lora_linear.recipe_of", fused.recipe_of)
    blocks = Blocks(adapter.model, ON_GPU)
    with prepared(adapter.model):
        expected = gradients(adapter)
        assert any(hasattr(x, "recipe") for x in used)
        used.clear()
        blocks.set_activations(activations)
        found = gradients(adapter)
    blocks.restore()
    assert all(map(torch.equal, found, expected))
    assert len(used) == 2 * 4 * 2  # four groups of two blocks, twice
    assert not any(hasattr(x, "recipe") for x in used)


@pytest.mark.parametrize("changed", [False, True])
def test_an_input_that_was_changed_in_place_is_saved(changed):
    gate, up = (torch.randn(5, 7, requires_grad=True) for _ in range(2))
    product = gated_product(gate, up, "silu")
    with torch.no_grad() if changed else nullcontext():
        product = product.mul_(2.0) if changed else product
    assert (recipe_of(product) is None) == changed


def test_inputs_without_a_gradient_have_no_recipe():
    with torch.no_grad():
        assert recipe_of(gated_product(torch.ones(2, 3), torch.ones(2, 3), "silu")) is None
    assert recipe_of(gated_product(torch.ones(2, 3), torch.ones(2, 3), "silu")) is None


@pytest.mark.parametrize(
    ("method", "dtype", "quantize"),
    [
        (LoRA(rank=3, targets=ALL), torch.bfloat16, "nf4"),
        (LoRA(rank=3, targets=ALL, dropout=0.2), torch.float32, "int8"),
        (DoRA(rank=3, targets=ALL), torch.float32, "none"),
        (LoRA(rank=3, targets=("q", "down")), torch.float32, "nf4"),
    ],
)
def test_recomputed_feed_forward_layers_save_what_is_planned(method, dtype, quantize):
    """Each block changes its mode by itself, and its bytes follow from those of kept blocks."""
    adapter = adapted(method, dtype, quantize)
    blocks = Blocks(adapter.model, ON_GPU)
    with prepared(adapter.model):
        expected, kept = gradients(adapter), saved(adapter)
        most = [*map(int.__sub__, kept.inside, kept.computed)]
        for mode, count, planned in (
            ("selective", None, kept.around),
            ("selective", 1, (kept.around[0], most[1])),
            ("recompute", 1, None),
        ):
            blocks.set_activations(mode, num_recomputed=count)
            found = gradients(adapter)
            assert all(map(torch.equal, found, expected)), (mode, count)
            less = saved(adapter)
            held = (*map(int.__sub__, less.inside, less.computed),)
            assert held == planned or mode == "recompute"
        assert held[0] < kept.around[0] < most[0], "one block is recomputed"
        assert sum(held) < sum(kept.around) < sum(most)
    blocks.restore()
    assert not any("forward" in module.__dict__ for module in adapter.model.modules())
