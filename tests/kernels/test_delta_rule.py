"""The gated delta rule against its recurrence and against transformers' chunked form."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from peftkit.kernels.delta_rule import gated_delta_rule, unit_lower_inverse

LENGTHS = [70, 9, 130, 64]


def inputs(dtype: torch.dtype = torch.float32, key_heads: int = 2) -> list[Tensor]:
    """Return query, key, value, g and beta of four rows."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(4, 130, *shape, generator=draw)

    tensors = [random(key_heads, 16), random(key_heads, 16), random(4, 8)]
    tensors += [-functional.softplus(random(4)), random(4).sigmoid()]
    return [x.to(dtype).requires_grad_() for x in tensors]


def recurrence(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of one row, token by token."""
    group = value.shape[1] // key.shape[1]
    query, key = (functional.normalize(x, dim=-1) for x in (query, key))
    state, outputs = torch.zeros(value.shape[1], key.shape[2], value.shape[2]), []
    for t in range(len(value)):
        k, q = (x[t].repeat_interleave(group, 0)[:, :, None] for x in (key, query))
        state = state * g[t].exp()[:, None, None]
        change = (value[t][:, None] - k.mT @ state) * beta[t][:, None, None]
        state = state + k @ change
        outputs.append((q.mT @ state)[:, 0] * key.shape[2] ** -0.5)
    return torch.stack(outputs)


def gradients(outputs: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    real = torch.arange(130) < torch.tensor(LENGTHS)[:, None]
    weight = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((outputs.float() * weight * real[..., None, None]).sum(), given)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_each_document_follows_the_recurrence(key_heads):
    given = inputs(key_heads=key_heads)
    out = gated_delta_rule(*given, normalize=True, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        expected = recurrence(*(x[row, :length] for x in given))
        # float32 sums in another order, over up to 130 updates of the state
        torch.testing.assert_close(out[row, :length], expected, rtol=1e-4, atol=1e-5)
        assert not out[row, length:].any()


@pytest.mark.parametrize("lengths", [LENGTHS, None])
@pytest.mark.parametrize("normalize", [True, False])
def test_outputs_and_gradients_are_those_of_transformers(lengths, normalize):
    given = inputs()
    if not normalize:
        given[1] = (0.2 * given[1]).detach().requires_grad_()  # of norm below one, as trained
    theirs, _ = torch_chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=normalize)
    ours = gated_delta_rule(*given, normalize=normalize, lengths=lengths)
    real = torch.arange(130) < torch.tensor(LENGTHS)[:, None]
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients(ours, given), gradients(theirs, given), strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def test_16_bit_inputs_are_computed_in_float32():
    given = inputs(torch.bfloat16)
    ours = gated_delta_rule(*given, normalize=True, lengths=LENGTHS)
    wide: Any = [x.float() for x in given]
    exact = gated_delta_rule(*wide, normalize=True, lengths=LENGTHS)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, exact.bfloat16())
    assert all(x.dtype == torch.bfloat16 for x in gradients(ours, given))


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_inverse_reads_only_the_strictly_lower_triangle(size):
    draw = torch.Generator().manual_seed(2)
    matrix = torch.randn(3, 2, size, size, generator=draw, dtype=torch.float64) / size
    expected = torch.linalg.inv(matrix.tril(-1) + torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(unit_lower_inverse(matrix), expected)
