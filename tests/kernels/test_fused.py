"""Gated activations and rotations by one kernel: what torch's own functions give, both ways."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from peftkit.kernels import fused
from peftkit.kernels.fused import (
    ACTIVATIONS,
    Gated,
    RMSNorm,
    Rotary,
    gated,
    gated_backward,
    norm,
    norm_gradient,
    rotated,
)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_torch(name):
    for dtype, shape in ((torch.float64, (3, 7)), (torch.float32, (9, 41)), (torch.bfloat16, (5,))):
        pair = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(2)]
        expected = ACTIVATIONS[name](pair[0]) * pair[1]
        actual = Gated.apply(*pair, name)
        direction = torch.randn(shape).to(dtype)
        torch.testing.assert_close(actual, expected)
        expected_gradients = torch.autograd.grad(expected, pair, direction)
        torch.testing.assert_close(torch.autograd.grad(actual, pair, direction), expected_gradients)


def test_only_the_two_inputs_are_saved():
    saved: list[Tensor] = []
    pair = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        Gated.apply(*pair, "silu")
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in pair]


def test_operators_keep_what_torch_asks_of_them():
    parts = [torch.randn(4, 6) for _ in range(3)]
    torch.library.opcheck(gated, (*parts[:2], "silu"))
    torch.library.opcheck(gated_backward, (*parts, "gelu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3], ids=["places of all rows", "of each"])
def test_a_rotation_matches_transformers_and_saves_nothing(rows, dtype):
    saved: list[Tensor] = []
    x = torch.randn(3, 5, 4, 8).to(dtype).transpose(1, 2).requires_grad_()  # as layers make it
    cos, sin = torch.randn(2, rows, 5, 8).to(dtype)
    expected = apply_rotary_pos_emb(x, x, cos, sin)[0]
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        Rotary.apply(x, cos, sin)
    assert [tensor.data_ptr() for tensor in saved] == [cos.data_ptr(), sin.data_ptr()]
    actual, direction = Rotary.apply(x, cos, sin), torch.randn_like(x)
    assert actual.stride() == x.stride()
    rounding = {"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **rounding)
    expected_gradients = torch.autograd.grad(expected, x, direction)
    torch.testing.assert_close(
        torch.autograd.grad(actual, x, direction), expected_gradients, **rounding
    )
    torch.library.opcheck(rotated, (x.detach(), cos, sin, False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 9, 16), (1, 1, 16), (3, 0, 16)], ids=str)
def test_a_norm_in_parts_is_the_norm_to_the_bit(shape, dtype, monkeypatch):
    x, direction = torch.randn(2, *shape).to(dtype)
    x, weight = x.requires_grad_(), torch.randn(16).to(dtype)

    def both() -> tuple[Tensor, Tensor]:
        out = RMSNorm.apply(x, weight, 1e-5)
        return out.detach(), torch.autograd.grad(out, x, direction)[0]

    expected = functional.rms_norm(x, (16,), weight, 1e-5)
    gradient = torch.autograd.grad(expected, x, direction)[0]
    whole = both()
    monkeypatch.setattr(fused, "PART", 5 * 16)
    for actual, same, torchs in zip(both(), whole, (expected, gradient), strict=True):
        assert torch.equal(actual, same)
        rounding = (
            {"rtol": 0.02, "atol": 0.05}
            if dtype == torch.bfloat16
            else {"rtol": 1e-4, "atol": 1e-5}
        )
        torch.testing.assert_close(actual, torchs.detach(), **rounding)


def test_operators_of_norms_keep_what_torch_asks_of_them():
    x, direction = torch.randn(2, 4, 6)
    _, scale = norm(x, torch.ones(6), 1e-5)
    torch.library.opcheck(norm, (x, torch.ones(6), 1e-5))
    torch.library.opcheck(norm_gradient, (direction, x, torch.ones(6), scale))
