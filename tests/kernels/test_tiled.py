"""Feed-forward layers in tiles are the layers as they are written."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.adapter import attach
from peftkit.execution import plan
from peftkit.forward.blocks import Blocks
from peftkit.kernels import tiled
from peftkit.methods.base import Method
from peftkit.methods.bottleneck import Bottleneck
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.model.blocks import feed_forward_modules
from peftkit.quant.layers import keep_copies
from peftkit.quant.quantize import quantize_model
from tests.helpers.adapters import gradients as gradients_of
from tests.helpers.adapters import perturb
from tests.helpers.families import ARCHITECTURES
from tests.helpers.kinds import inputs, loss

SIZES = {"llama": 2, "qwen3": 2, "gpt2": 2, "t5": 4, "deepseek_v3": 1, "gemma2": 0, "opt": 0}
"""How many feed-forward modules are by themselves, and their output read by a sum alone."""
METHODS: dict[str, Method] = {
    "lora": LoRA(rank=3),
    "dropout": LoRA(rank=3, dropout=0.5),
    "attention": LoRA(rank=3, targets=("attention",)),
    "dora": DoRA(rank=3),
    "houlsby": Bottleneck(style="houlsby", size=4),
    "parallel": Bottleneck(style="parallel", size=4),
}


def moved(model: nn.Module, method: Method) -> nn.Module:
    """Attach an adapter whose tensors are not zero."""
    adapter = attach(model.train(), method)
    perturb(adapter.parameters(), 0.1, seed=1)
    adapter.prepare_training()
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(3)
    value = loss(model, inputs(model))
    return {"loss": value.detach(), **gradients_of(model, value)}


@pytest.mark.parametrize(("family", "count"), SIZES.items())
def test_tiled_layers_are_those_whose_output_has_one_reader(family, count):
    assert len(feed_forward_modules(ARCHITECTURES[family]())) == count


@pytest.mark.parametrize(
    ("method", "family", "kind"),
    [
        ("lora", "llama", "nf4"),
        ("lora", "t5", "none"),
        ("dropout", "llama", "none"),
        ("attention", "gpt2", "nf4"),
        ("dora", "gpt2", "none"),
        ("houlsby", "llama", "nf4"),
        ("parallel", "t5", "nf4"),
    ],
)
def test_gradients_equal_those_without_tiles(method, family, kind, monkeypatch):
    torch.manual_seed(0)
    model = ARCHITECTURES[family]()
    for part in model.modules():  # those of a family's own draw other numbers tile by tile
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    if kind != "none":
        quantize_model(model, kind, compute_dtype=torch.float32)
        keep_copies(model, 0)
    moved(model, METHODS[method])
    blocks = Blocks(model)
    blocks.set_activations("recompute", tiles=True)
    expected = gradients(model)
    monkeypatch.setattr(plan, "TILE", 5)
    values = gradients(model)
    assert values.keys() == expected.keys()
    if method == "dropout":  # other numbers are drawn; the same ones in both passes over a tile
        assert all(bool(torch.isfinite(grad).all()) for grad in values.values())
        return
    for name, grad in expected.items():
        torch.testing.assert_close(values[name], grad, rtol=1e-4, atol=1e-5)


def test_dropout_of_a_tile_repeats_in_backward(monkeypatch):
    monkeypatch.setattr(plan, "TILE", 5)
    model: Any = moved(ARCHITECTURES["llama"](), LoRA(rank=3, dropout=0.5))
    layer = model.model.layers[0].mlp
    blocks = Blocks(model)
    blocks.set_activations("recompute", tiles=True)
    x = torch.randn(1, 12, 32, dtype=torch.float32)
    b = layer.down_proj.lora_B
    torch.manual_seed(5)
    (grad,) = torch.autograd.grad(layer(x).sum(), b)
    step, values = 1e-2, []
    for sign in (1, -1):  # it is linear in B
        with torch.no_grad():
            b[3, 1] += sign * step
        torch.manual_seed(5)
        values.append(float(layer(x).sum().detach()))
        with torch.no_grad():
            b[3, 1] -= sign * step
    assert float(grad[3, 1]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-2)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A model in tiles of five tokens, and the sizes that a feed-forward layer computes."""
    monkeypatch.setattr(plan, "TILE", 5)
    model: Any = moved(ARCHITECTURES["llama"](), LoRA(rank=3))
    seen: list[int] = []
    model.model.layers[1].mlp.act_fn.register_forward_hook(
        lambda module, args, out: seen.append(out.shape[1])
    )
    return model, seen


def test_recomputation_ends_before_the_feed_forward(watched):
    model, seen = watched
    blocks = Blocks(model)
    blocks.set_activations("recompute", tiles=True)
    loss(model, inputs(model)).backward()  # tiles are compared with the whole layer
    seen.clear()
    loss(model, inputs(model)).backward()
    assert seen == [5, 5, 2] * 2  # once forward, once again tile by tile
    blocks.restore()
    seen.clear()
    loss(model, inputs(model)).backward()
    assert seen == [12]


def test_computing_between_two_steps_keeps_the_tiles(watched):
    model, seen = watched
    run = Blocks(model)
    run.set_activations("recompute", tiles=True)
    between = Blocks(model)
    between.set_activations("keep")
    loss(model, inputs(model)).backward()
    assert seen == [12]
    between.set_activations("recompute", tiles=True)
    between.restore()
    seen.clear()
    loss(model, inputs(model)).backward()
    assert seen == [5, 5, 2] * 2
    run.restore()
    assert not any("forward" in module.__dict__ for module in model.modules())


class Shifted(nn.Module):
    """A feed-forward layer that reads the token before, as RWKV's does."""

    def __init__(self, shift):
        super().__init__()
        self.up, self.shift = nn.Linear(6, 9), shift

    def forward(self, x):
        before = nn.functional.pad(x, (0, 0, 1, -1))
        return self.up(x) + self.shift * self.up(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_that_compute_other_numbers_are_refused(dtype, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 11, 6, dtype=dtype)
    right, mixing = (Shifted(shift).to(dtype) for shift in (0.0, 0.5))
    trained = [[*layer.parameters()] for layer in (right, mixing)]
    assert tiled.why_not_tiled(right, x, trained[0]) == ""
    assert "output" in tiled.why_not_tiled(mixing, x, trained[1])
    backward = tiled._Tiled.backward

    def planted(ctx, *grads):
        *others, first, second = backward(ctx, *grads)
        return (*others, first, 0.8 * second)

    monkeypatch.setattr(tiled._Tiled, "backward", staticmethod(planted))
    assert "trained gradient" in tiled.why_not_tiled(right, x, trained[0])


def test_a_layer_that_mixes_tokens_runs_whole_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(plan, "TILE", 8)
    model: Any = moved(ARCHITECTURES["llama"](), LoRA(rank=3, targets=("q",)))
    mixing = type("Mixing", (type(model.model.layers[0].mlp),), {
        "forward": lambda self, x: self.down_proj(self.up_proj(x) + self.up_proj(x).roll(1, 1))
    })  # fmt: skip
    for layer in model.model.layers:
        layer.mlp.__class__ = mixing
    ids = torch.arange(20)[None] % 9 + 3
    expected = gradients_of(model, model(input_ids=ids, labels=ids).loss)
    blocks = Blocks(model)
    blocks.set_activations("recompute", tiles=True)
    found = gradients_of(model, model(input_ids=ids, labels=ids).loss)
    blocks.restore()
    assert [record.message for record in caplog.records if "in tiles" in record.message] == [
        "Feed-forward layers of the class Mixing are not computed in tiles: the output differs "
        "from the whole row's. Long rows need more memory."
    ]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)  # fp32, recomputed
