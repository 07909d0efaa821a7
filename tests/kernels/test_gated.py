"""Gated activations by one kernel: what torch's own functions give, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peftkit.kernels.gated import ACTIVATIONS, Gated, gated, gated_backward


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
