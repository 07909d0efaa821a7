"""RMSNorms by one kernel: the module is asked, and computes what it computed before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.execution.plan import plan_for
from peftkit.model.norms import fused_norms, num_fused
from tests.families import FAMILIES

IDS = torch.arange(24).view(2, 12) + 3
FUSED = {"llama": 5, "qwen3": 9, "phi3": 5, "mixtral": 5, "t5": 12, "gemma2": 0, "gpt2": 0}


def loss_and_gradient(model: Any) -> tuple[Tensor, Tensor]:
    asked = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, **asked).logits.logsumexp(-1).sum()
    (gradient,) = torch.autograd.grad(loss, embedded)
    return loss.detach(), gradient


@pytest.mark.parametrize(("family", "count"), FUSED.items())
def test_a_model_computes_what_it_computed_before(family: str, count: int) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().requires_grad_(False).eval()
    for module in model.modules():
        if "Norm" in type(module).__name__:
            nn.init.uniform_(module.weight, 0.5, 1.5)
    kinds = [type(module) for module in model.modules()]
    loss, gradient = loss_and_gradient(model)
    with fused_norms(model):
        assert num_fused(model) == count
        found, own = loss_and_gradient(model)
    assert [type(module) for module in model.modules()] == kinds
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, gradient, rtol=1e-4, atol=1e-5)


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
def test_what_is_another_norm_or_learns_stays_as_it_is(kind: str) -> None:
    norm = Norm(kind)
    with fused_norms(norm):
        assert num_fused(norm) == 0


def test_only_where_there_is_a_kernel_and_nobody_else_makes_one() -> None:
    norm, x = Norm(), torch.randn(3, 8)
    expected, gated = norm(x), norm(x, x)
    assert not plan_for("cpu").fused_norms
    assert plan_for("cuda").fused_norms
    with fused_norms(norm):
        assert isinstance(norm, Norm)
        assert norm(x).grad_fn is None
        assert torch.equal(norm(x, x), gated)
        assert torch.equal(norm(x.double()), norm.forward(x.double()))  # of another dtype
        own = x.clone().requires_grad_()
        assert "RMSNorm" in str(norm(own).grad_fn)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "RMSNorm" not in str(norm(own).grad_fn)
        torch.testing.assert_close(norm(x), expected)
        kind = type(norm)
        with fused_norms(norm):
            assert type(norm) is kind  # it is already
        assert type(norm) is kind
    assert type(norm) is Norm


def test_a_norm_is_itself_again_after_an_exception() -> None:
    norm = Norm()
    with pytest.raises(ZeroDivisionError), fused_norms(norm):
        raise ZeroDivisionError
    assert type(norm) is Norm


def test_blocks_are_still_compiled_once() -> None:
    torch._dynamo.reset()
    blocks = nn.ModuleList(Norm() for _ in range(3))
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with fused_norms(blocks):
        x = torch.randn(3, 8)
        for block in blocks:
            found = torch.compile(type(block).forward, backend=backend)(block, x)
            torch.testing.assert_close(found, block(x))
    assert len(graphs) == 1
