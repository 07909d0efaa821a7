"""Gated activations by one kernel: what torch's own functions give, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.kernels.gated import ACTIVATIONS, Gated, gated, gated_backward
from peftkit.model.gates import fused_gates, num_gates
from tests.families import ARCHITECTURES
from tests.kinds import inputs, loss

FUSED = {"llama": 2, "qwen3": 2, "gemma": 2, "gemma2": 2, "mixtral": 0, "phi3": 0, "gpt2": 0}
FUSED |= {"deepseek_v3": 2, "qwen2_moe": 2, "t5_gated": 0, "bert": 0}
"""Blocks with gate, up and down as three layers of a module; of experts, what all tokens share."""


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_torch(name: str) -> None:
    for dtype, shape in ((torch.float64, (3, 7)), (torch.float32, (9, 41)), (torch.bfloat16, (5,))):
        pair = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(2)]
        expected = ACTIVATIONS[name](pair[0]) * pair[1]
        found = Gated.apply(*pair, name)
        direction = torch.randn(shape).to(dtype)
        torch.testing.assert_close(found, expected)
        wanted = torch.autograd.grad(expected, pair, direction)
        torch.testing.assert_close(torch.autograd.grad(found, pair, direction), wanted)


def test_only_the_two_inputs_are_saved() -> None:
    saved: list[Tensor] = []
    pair = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        Gated.apply(*pair, "silu")
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in pair]


def test_operators_keep_what_torch_asks_of_them() -> None:
    parts = [torch.randn(4, 6) for _ in range(3)]
    torch.library.opcheck(gated, (*parts[:2], "silu"))
    torch.library.opcheck(gated_backward, (*parts, "gelu"))


@pytest.mark.parametrize(("family", "count"), FUSED.items())
def test_a_model_computes_what_it_computed_before(family: str, count: int) -> None:
    torch.manual_seed(0)
    model: Any = ARCHITECTURES[family]().eval()
    kinds = [type(module) for module in model.modules()]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        value = loss(model, inputs(model))
        value.backward()
        return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    with fused_gates(model):
        assert num_gates(model) == count
        found = gradients()
    assert [type(module) for module in model.modules()] == kinds
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


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
def test_what_computes_something_else_stays_as_it_is(kind: str) -> None:
    layer, x = Layer(kind), torch.randn(3, 6)
    expected = layer(x)
    with fused_gates(layer):
        assert num_gates(layer) == (kind == "")
        torch.testing.assert_close(layer(x), expected)
