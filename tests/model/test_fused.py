"""What one kernel computes: a module is asked, and computes what it computed before."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.fused import fused_modules, num_fused
from tests.helpers.families import ARCHITECTURES
from tests.helpers.kinds import inputs, loss

FUSED = {"llama": 5 + 2 + 2, "qwen3": 9 + 2 + 2, "phi3": 5 + 2, "mixtral": 5 + 2, "gemma": 2 + 2}
FUSED |= {"gemma2": 2 + 2, "cohere": 2, "t5_gated": 12, "gpt2": 0, "bert": 0, "gpt_neox": 2}
FUSED |= {"deepseek_v3": 9 + 2 + 2, "qwen2_moe": 5 + 2 + 2}
"""Norms that are no other norm; blocks with gate, up and down as three layers of a module (of
experts, what all tokens share); rotations of whole heads, or what may be."""


@pytest.mark.parametrize(("family", "count"), FUSED.items())
def test_a_model_computes_what_it_computed_before(family, count):
    torch.manual_seed(0)
    model: Any = ARCHITECTURES[family]().eval()
    for module in model.modules():
        if "Norm" in type(module).__name__:
            nn.init.uniform_(module.weight, 0.5, 1.5).requires_grad_(False)
    kinds = [type(module) for module in model.modules()]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        value = loss(model, inputs(model))
        value.backward()
        return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    with fused_modules(model):
        assert num_fused(model) == count
        actual = gradients()
    assert [type(module) for module in model.modules()] == kinds
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class Norm(nn.Module):
    """RMSNorm, or nearly."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.eps = kind, 1e-5
        self.weight = nn.Parameter(torch.rand(8) + 0.5, requires_grad=kind == "trained")
        if kind == "bias":
            self.bias = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        values = x.float()
        mean = values.square().mean(-1, keepdim=True)
        eps = 0.0 if self.kind == "without eps" else self.eps
        normal = values / (mean.sqrt() + eps) if self.kind == "eps outside" else values
        normal = normal if self.kind == "eps outside" else values * torch.rsqrt(mean + eps)
        weight = 1 + self.weight if self.kind == "one more" else self.weight
        out = normal.to(torch.float32 if self.kind == "stays float32" else x.dtype) * weight
        return out if gate is None else out * gate


@pytest.mark.parametrize(
    "kind", ["one more", "eps outside", "without eps", "bias", "trained", "stays float32"]
)
def test_what_is_another_norm_or_learns_stays_as_it_is(kind):
    norm = Norm(kind)
    with fused_modules(norm):
        assert num_fused(norm) == 0


def test_only_where_there_is_a_kernel_and_nobody_else_makes_one():
    norm, x = Norm(), torch.randn(3, 8)
    expected, gated = norm(x), norm(x, x)
    assert not ExecutionPlan(device="cpu").fused_kernels
    assert ExecutionPlan(device="cuda").fused_kernels
    with fused_modules(norm):
        assert isinstance(norm, Norm)
        assert norm(x).grad_fn is None
        assert torch.equal(norm(x, x), gated)
        assert torch.equal(norm(x.double()), norm.forward(x.double()))  # of another dtype
        leaf = x.clone().requires_grad_()
        assert "RMSNorm" in str(norm(leaf).grad_fn)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "RMSNorm" not in str(norm(leaf).grad_fn)
        torch.testing.assert_close(norm(x), expected)
        kind = type(norm)
        with fused_modules(norm):
            assert type(norm) is kind  # it is already
        assert type(norm) is kind
    assert type(norm) is Norm


class Layer(nn.Module):
    """A gated feed-forward layer, or nearly."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 8), nn.Linear(6, 8)
        self.down_proj, self.act_fn = nn.Linear(8, 6), nn.Tanh() if kind == "tanh" else nn.SiLU()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.kind == "clamped":
            gate = gate.clamp(max=0.5)
        if self.kind == "swapped":
            gate, up = up, gate
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.parametrize("kind", ["", "tanh", "clamped", "swapped"])
def test_a_layer_that_computes_something_else_stays_as_it_is(kind):
    layer, x = Layer(kind), torch.randn(3, 6)
    expected = layer(x)
    with fused_modules(layer):
        assert num_fused(layer) == (kind == "")
        torch.testing.assert_close(layer(x), expected)
