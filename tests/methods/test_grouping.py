"""Layers computed together against the same layers each on its own."""

import copy
import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer
from torch.utils.checkpoint import checkpoint

from peftkit.adapter import Adapter, attach, refresh_copies, separate_wrong_groups
from peftkit.events import StepDone
from peftkit.kernels import lora
from peftkit.kernels.lora import Layer, grouped_lora_linear
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_linear import LoRAGroup, LoRALinear
from peftkit.quant.layers import keep_copies
from peftkit.quant.quantize import quantize_model
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.loop import fit
from tests.helpers.families import ARCHITECTURES
from tests.helpers.spread import spread

FAMILIES = ("llama", "gpt2", "qwen2", "gpt_neox", "phi3", "gemma2", "deepseek_v3", "qwen3_moe")
IDS = torch.arange(36).remainder(23).view(3, 12) + 3


def built(family: str, dtype: torch.dtype, kind: str = "none", cached: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[family]().to(dtype)
    if kind != "none":
        quantize_model(model, kind, double_quant=True, compute_dtype=dtype)
        assert bool(keep_copies(model, 1 << 30 if cached else 0)) == cached
    return model.train()


def filled(model: nn.Module, method: LoRA, *, prepared: bool = True) -> Adapter:
    """Attach an adapter whose B is not zero."""
    adapter = attach(model, method)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if prepared:
        adapter.prepare_training()
    return adapter


def gradients(adapter: Adapter) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(3)  # some families have dropout of their own
    loss = adapter.model(input_ids=IDS, labels=IDS, use_cache=False).loss
    adapter_parameters = list(adapter.parameters())
    return loss.detach(), list(torch.autograd.grad(loss, adapter_parameters))


def groups_of(adapter: Adapter) -> list[LoRAGroup]:
    found = (m.group for m in adapter.modules.values() if isinstance(m, LoRALinear))
    return list({id(group): group for group in found if isinstance(group, LoRAGroup)}.values())


def plain(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list]:
    with monkeypatch.context() as patch:
        patch.setattr(LoRAGroup, "takes", lambda self, x: False)
        return gradients(adapter)


@pytest.mark.parametrize(
    ("family", "dtype", "kind"),
    spread(product(FAMILIES, (torch.float32, torch.bfloat16), ("none", "nf4", "nf4 cached")), 5),
)
def test_together_is_the_same_as_each_alone(family, dtype, kind, monkeypatch):
    model = built(family, dtype, kind.split()[0], cached="cached" in kind)
    adapter = filled(model, LoRA(rank=3, alpha=6))
    loss, grads = gradients(adapter)
    assert groups_of(adapter)
    want, alone = plain(adapter, monkeypatch)
    # float32: sums in another order; bfloat16 rounds each of the two products of the reference
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(loss, want, rtol=tolerance, atol=tolerance)
    error = torch.stack([(a - b).norm() for a, b in zip(grads, alone, strict=True)]).norm()
    size = torch.stack([b.norm() for b in alone]).norm()
    assert error <= (1e-4 if dtype == torch.float32 else 0.15) * size


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dropped", [True, False])
def test_gradients_of_a_group_match_finite_differences(with_bias, dropped):
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(n, 7, dtype=torch.float64) for n in (3, 4)]
    biases = [torch.randn(n, dtype=torch.float64) for n in (3, 4)]
    pairs = list(zip(weights, biases, strict=True))
    frozen = [tensor for pair in pairs for tensor in pair] if with_bias else weights
    mask = (torch.rand(5, 7) > 0.3).double() * 1.5 if dropped else torch.ones(5, 7).double()
    shapes = ((2, 7), (3, 7), (3, 2), (4, 3))  # A and B of ranks 2 and 3
    masters = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    scales = torch.tensor([2.5] * 2 + [3.5] * 3).double()

    def compute(x: torch.Tensor, *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a1, a2, *lora_b = (master.detach() for master in masters)
        lora_a = torch.cat([a1, a2]) * scales[:, None]
        read = x * mask if dropped else None
        layers = (Layer(None, 0, with_bias),) * 2
        return grouped_lora_linear(x, read, layers, frozen, lora_a, scales, lora_b, masters)

    assert torch.autograd.gradcheck(compute, (x, *masters))
    outputs = compute(x, *masters)
    for n, (output, (weight, bias)) in enumerate(zip(outputs, pairs, strict=True)):
        update = (2.5, 3.5)[n] * (x * mask) @ masters[n].t() @ masters[2 + n].t()
        expected = x @ weight.t() + update
        torch.testing.assert_close(output, expected + bias if with_bias else expected)


def test_recomputation_skips_the_last_base_product(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(5, 7, requires_grad=True)
    weights, used = [torch.randn(7, 7) for _ in range(2)], []
    masters = [torch.randn(shape, requires_grad=True) for shape in ((2, 7), (7, 2))]
    lora_a, lora_b = (m.detach() for m in masters)

    def block(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            tensors = lora_a, torch.ones(2), [lora_b], masters
            (x,) = grouped_lora_linear(x, None, (Layer(None, 0, False),), [weight], *tensors)
        return x

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        used.append(weight)
        return x @ weight.t()

    block(x).sum().backward()
    expected = [x.grad, *(m.grad for m in masters)]
    x.grad = masters[0].grad = masters[1].grad = None
    monkeypatch.setattr("peftkit.kernels.lora.functional.linear", counted)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert [weight is weights[0] for weight in used] == [True, False, True]
    for gradient, grad in zip([x.grad, *(m.grad for m in masters)], expected, strict=True):
        assert torch.equal(gradient, grad)


@pytest.mark.parametrize(
    ("part", "change"),
    [("whole", "fused"), ("one layer", "plain"), ("without the head", "copy"), ("whole", "load")],
)
def test_no_group_computes_with_a_changed_adapter(part, change):
    model = built("llama", torch.float32)
    adapter = filled(model, LoRA(rank=3, alpha=6))
    x = torch.randn(2, 5, model.config.hidden_size)

    def hidden_states() -> torch.Tensor:
        if part == "one layer":  # the same tensor is given to one layer now, to another later
            return model.model.layers[0].self_attn.k_proj(x)
        run = model if part == "whole" else model.model
        return run(IDS, use_cache=False)[0]

    changes: dict[str, Callable[[], Any]] = {
        "copy": lambda: [p.add_(0.5) for p in adapter.parameters()],
        "load": lambda: adapter.load_state({n: t + 0.5 for n, t in adapter.state().items()}),
    }
    gradients(adapter)
    model.model.layers[0].self_attn.q_proj(x)
    sgd = torch.optim.SGD(list(adapter.parameters()), lr=1.0, fused=change == "fused")
    if change in changes:
        with torch.no_grad():
            changes[change]()
    else:
        for parameter in adapter.parameters():
            parameter.grad = torch.full_like(parameter, -0.5)
        sgd.step()
    now = hidden_states()
    adapter.end_training()
    torch.testing.assert_close(now, hidden_states(), rtol=1e-4, atol=1e-4)


def test_after_its_end_nothing_is_left_and_no_step_is_listened_to():
    hooks = optimizer._global_optimizer_post_hooks
    gc.collect()
    before = len(hooks)
    for _ in range(2):  # the first model is dropped without an end
        adapter = filled(built("llama", torch.float32), LoRA(rank=3, alpha=6))
    gc.collect()
    assert len(hooks) == before + 1
    adapter.end_training()
    assert len(hooks) == before
    assert groups_of(adapter) == []
    moved = copy.deepcopy(adapter.model).to(torch.float64)  # as after fit: moved, cast, copied
    assert moved(input_ids=IDS).logits.dtype == torch.float64


def test_autocast_has_its_groups_beside_a_wide_base(monkeypatch):
    adapter = filled(built("qwen2", torch.float32), LoRA(rank=3, alpha=6), prepared=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        adapter.prepare_training()
        loss, grads = gradients(adapter)
        assert all(group.lora_a.dtype == torch.bfloat16 for group in groups_of(adapter))
        want, alone = plain(adapter, monkeypatch)
    torch.testing.assert_close(loss, want, rtol=0.05, atol=0.05)
    error = torch.stack([(a - b).norm() for a, b in zip(grads, alone, strict=True)]).norm()
    assert error <= 0.15 * torch.stack([b.norm() for b in alone]).norm()
    assert all(group.takes(torch.zeros(1)) is False for group in groups_of(adapter))  # outside


def test_a_layer_with_another_input_breaks_its_group_up(monkeypatch):
    model = built("llama", torch.float32)
    adapter = filled(model, LoRA(rank=3, alpha=6))
    for layer in model.model.layers:  # k sees another tensor than q and v
        layer.self_attn.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))
    loss, _ = gradients(adapter)
    refresh_copies(model)
    again, grads = gradients(adapter)
    want, alone = plain(adapter, monkeypatch)
    torch.testing.assert_close(torch.stack([loss, again]), torch.stack([want, want]))
    torch.testing.assert_close(grads, alone, rtol=1e-4, atol=1e-5)
    assert sorted(len(group.layers) for group in groups_of(adapter)) == [1] * 10 + [2] * 2


def test_groups_follow_the_steps_of_a_run(llama, tokenizer, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "it is {word}"}}\n' for word in ("red", "blue", "new")))
    task = CausalLM(llama, tokenizer, DataConfig(train=str(rows), max_length=64))
    losses: dict[bool, list[float]] = {True: [], False: []}
    for grouped, events in losses.items():
        adapter = attach(llama, LoRA(rank=3))
        config = TrainConfig(output_dir=tmp_path / str(grouped), epochs=4, learning_rate=0.05)
        fit(
            llama,
            task,
            task.load(str(rows)),
            config=config.model_copy(update={"group_layers": grouped}),
            on_event=lambda event, seen=events: (
                seen.append(event.loss) if isinstance(event, StepDone) else None
            ),
        )
        adapter.detach()
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)  # sums in another order
    assert losses[True][-1] < 0.8 * losses[True][0]


@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_that_compute_other_numbers_are_separated_before_training(
    dtype, quantize, monkeypatch
):
    model = built("llama", dtype, quantize)
    adapter = filled(model, LoRA(rank=3, alpha=6, dropout=0.2))
    adapter.prepare_training()
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    assert separate_wrong_groups(model) == ""
    assert groups_of(adapter)
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter.state().items())
    assert {m.dropout.p for m in adapter.modules.values()} == {0.2}
    right = lora._GroupedLoRALinear.backward

    def planted(number, change):
        def backward(ctx, *grads):
            found = list(right(ctx, *grads))
            at = number if number > 0 else number * len(ctx.layers)  # A, then B of each layer
            found[at] = change(found[at])
            return tuple(found)

        return backward

    # of the input, of the first A and the last B: one sign, a twentieth too large, of other rows
    for number, change in ((3, torch.neg), (-2, lambda g: 1.05 * g), (-1, lambda g: g.roll(1, 0))):
        adapter.prepare_training()
        with monkeypatch.context() as patch:
            wrong = staticmethod(planted(number, change))
            patch.setattr(lora._GroupedLoRALinear, "backward", wrong)
            assert "gradient" in separate_wrong_groups(model), number
        assert not groups_of(adapter)
