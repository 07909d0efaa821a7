"""Log-probabilities of tokens, each with its own weight, are the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peftkit.kernels import cross_entropy
from peftkit.kernels.cross_entropy import chunked_log_probs, reference_log_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("num_rows", [0, 1, 41])
def test_each_token_has_its_own_gradient(
    num_rows: int, trained: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "ALIGNMENT", 4)
    head = nn.Linear(9, 341).to(dtype).requires_grad_(trained)
    hidden = torch.randn(num_rows, 9).to(dtype).requires_grad_()
    targets, weights = torch.randint(0, 341, (num_rows,)), torch.randn(num_rows)
    learnt = [hidden, *head.parameters()] if trained else [hidden]
    expected = reference_log_probs(hidden, targets, head)
    wanted = torch.autograd.grad(expected @ weights, learnt)
    own = list(head.parameters()) if trained else []
    found = chunked_log_probs(hidden, targets, head, trainable=own, chunk_rows=7)
    gradients = torch.autograd.grad(found @ weights, learnt)
    # float32: other order of sums; bfloat16: gradients are rounded once per chunk
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 5e-2)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * 10)
