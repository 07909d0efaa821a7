"""Layers computed together against the same layers each on its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peftkit.adapter import Adapter, attach
from peftkit.kernels.grouped import GroupedLinear, Member, grouped_linear_reference
from peftkit.kernels.packed import keep_copies
from peftkit.methods.grouping import Group
from peftkit.methods.lora import LoRA
from peftkit.methods.lora_linear import LoRALinear
from peftkit.quant.quantize import quantize_model
from tests.families import ARCHITECTURES

FAMILIES = ("llama", "gpt2", "qwen2", "gpt_neox", "phi3", "gemma2", "deepseek_v3", "qwen3_moe")
IDS = torch.arange(36).remainder(23).view(3, 12) + 3


def built(family: str, dtype: torch.dtype, kind: str = "none") -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[family]().to(dtype)
    if kind != "none":
        quantize_model(model, kind, double_quant=True, compute_dtype=dtype)
        assert keep_copies(model, 1 << 30)
    return model.train()


def filled(model: nn.Module, method: LoRA) -> Adapter:
    """Attach an adapter whose B is not zero."""
    adapter = attach(model, method)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapter


def gradients(adapter: Adapter) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(3)  # some families have dropout of their own
    loss = adapter.model(input_ids=IDS, labels=IDS, use_cache=False).loss
    adapter_parameters = list(adapter.parameters())
    return loss.detach(), list(torch.autograd.grad(loss, adapter_parameters))


def groups_of(adapter: Adapter) -> list[Group]:
    found = (m.group for m in adapter.modules.values() if isinstance(m, LoRALinear))
    return list({id(group): group for group in found if isinstance(group, Group)}.values())


def plain(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list]:
    with monkeypatch.context() as patch:
        patch.setattr(Group, "takes", lambda self, x: False)
        return gradients(adapter)


@pytest.mark.parametrize("kind", ["none", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("targets", ["all-linear", "attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_together_is_the_same_as_each_alone(
    family: str, targets: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = LoRA(rank=3, alpha=6, targets=targets)
    adapter = filled(built(family, dtype, kind), method)
    loss, grads = gradients(adapter)
    assert groups_of(adapter)
    want, wanted = plain(adapter, monkeypatch)
    # float32: sums in another order; bfloat16 rounds each of the two products of the reference
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(loss, want, rtol=tolerance, atol=tolerance)
    error = torch.stack([(a - b).norm() for a, b in zip(grads, wanted, strict=True)]).norm()
    size = torch.stack([b.norm() for b in wanted]).norm()
    assert error <= (1e-4 if dtype == torch.float32 else 0.15) * size


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dropped", [True, False])
def test_gradients_are_those_of_finite_differences(with_bias: bool, dropped: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    a = [torch.randn(2, 7, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    b = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 4)]
    base = torch.randn(7, 7, dtype=torch.float64)
    bias = torch.randn(7, dtype=torch.float64) if with_bias else None
    members = (Member(3, 2), Member(4, 2))
    scales = torch.tensor([0.5, 0.5, 2.0, 2.0], dtype=torch.float64)
    mask = (torch.rand(5, 7) > 0.3).double() * 1.5 if dropped else None

    def compute(x: torch.Tensor, *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = torch.block_diag(0.5 * masters[2].detach(), 2.0 * masters[3].detach())
        weight = torch.cat([base, scaled], dim=1)
        stacked = torch.cat([m.detach() for m in masters[:2]])
        given = None if mask is None else x * mask
        return GroupedLinear.apply(x, given, weight, stacked, scales, bias, members, *masters)

    assert torch.autograd.gradcheck(compute, (x, *a, *b))
    if mask is None:
        weight = torch.cat([base, torch.block_diag(0.5 * b[0], 2.0 * b[1])], dim=1)
        expected = grouped_linear_reference(x, weight, torch.cat(a), bias)
        torch.testing.assert_close(torch.cat(compute(x, *a, *b), dim=1), expected)


def test_layers_of_one_input_are_one_group_and_others_are_alone() -> None:
    adapter = filled(built("llama", torch.float32), LoRA(rank=3, alpha=6))
    gradients(adapter)
    sizes = sorted(len(group.members) for group in groups_of(adapter))
    assert sizes == [1, 1, 1, 1, 2, 2, 3, 3]  # o and down, gate and up, q, k and v of two blocks


def test_a_changed_adapter_is_what_computes() -> None:
    adapter = filled(built("llama", torch.float32), LoRA(rank=3, alpha=6))
    before, _ = gradients(adapter)
    with torch.no_grad():
        next(iter(adapter.parameters())).add_(1.0)
    after, _ = gradients(adapter)
    assert abs(after - before) > 1e-4


def test_a_layer_with_another_input_breaks_its_group_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama", torch.float32)
    adapter = filled(model, LoRA(rank=3, alpha=6))
    for layer in model.model.layers:  # k sees another tensor than q and v
        layer.self_attn.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))
    loss, _ = gradients(adapter)
    again, grads = gradients(adapter)
    want, wanted = plain(adapter, monkeypatch)
    torch.testing.assert_close(torch.stack([loss, again]), torch.stack([want, want]))
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)
    assert sorted(len(group.members) for group in groups_of(adapter)) == [1] * 10 + [2] * 2


def test_detach_gives_every_weight_memory_of_its_own() -> None:
    model = built("llama", torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = filled(model, LoRA(rank=3, alpha=6))
    gradients(adapter)
    adapter.detach()
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(tensor.is_contiguous() for tensor in after.values())
    storages = [p.untyped_storage().nbytes() for p in model.parameters()]
    assert storages == [p.numel() * p.element_size() for p in model.parameters()]


def test_thirty_steps_end_where_those_of_single_layers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = []
    for together in (True, False):
        adapter = filled(built("llama", torch.float32), LoRA(rank=3, alpha=6))
        optimizer = torch.optim.AdamW(list(adapter.parameters()), lr=5e-3, fused=True)
        losses = []
        for _ in range(30):
            loss, grads = gradients(adapter) if together else plain(adapter, monkeypatch)
            for parameter, grad in zip(adapter.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.step()
            losses.append(float(loss))
        curves.append(torch.tensor(losses))
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-3, atol=1e-3)


def test_dropout_drops_from_the_input_of_a_alone() -> None:
    losses = []
    for dropout in (0.0, 0.5):
        adapter = filled(built("llama", torch.float32), LoRA(rank=3, alpha=6, dropout=dropout))
        losses.append(gradients(adapter)[0])
        with torch.no_grad():
            for module in adapter.modules.values():
                module.lora_B.zero_()
        losses.append(gradients(adapter)[0])
    assert losses[0] != losses[2]
    torch.testing.assert_close(losses[1], losses[3])  # the base's part is never dropped
