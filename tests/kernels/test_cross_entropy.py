"""Chunked losses are the plain ones, for every head, dtype and odd size."""

import pytest
import torch
from torch import nn

from peftkit.kernels import cross_entropy
from peftkit.kernels.cross_entropy import chunked_cross_entropy


def reference(hidden: torch.Tensor, targets: torch.Tensor, head: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(head(hidden).float(), targets, reduction="none")


class SoftCapped(nn.Module):
    """A head with a bias, a scale and Gemma 2's tanh cap."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, vocab)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 5.0 * torch.tanh(0.7 * self.linear(x) / 5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("trained", ["no", "alike", "each"])
@pytest.mark.parametrize(
    ("num_rows", "chunk", "alignment"), [(0, 7, 16), (1, 1, 1), (41, 7, 16), (41, 1000, 1)]
)
def test_losses_and_gradients_are_those_of_the_whole(
    num_rows, chunk, alignment, trained, dtype, monkeypatch
):
    monkeypatch.setattr(cross_entropy, "ALIGNMENT", alignment)
    torch.manual_seed(0)
    head = SoftCapped(9, 341).to(dtype).requires_grad_(trained != "no")
    hidden = torch.randn(num_rows, 9).to(dtype).requires_grad_()
    targets = torch.randint(0, 341, (num_rows,))
    head_parameters = [] if trained == "no" else list(head.parameters())
    weights = torch.randn(num_rows) if trained != "alike" else torch.full((num_rows,), 3.0)
    expected = reference(hidden, targets, head)
    expected_values = torch.autograd.grad(expected @ weights, [hidden, *head_parameters])
    settings = {
        "trainable": head_parameters,
        "equal_weights": trained == "alike",
        "chunk_rows": chunk,
    }
    losses = chunked_cross_entropy(hidden, targets, head, **settings)
    actual = torch.autograd.grad(losses @ weights, [hidden, *head_parameters])
    # float32: other order of sums; bfloat16: gradients are rounded once per chunk
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 5e-2)
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=atol)
    for a, b in zip(actual, expected_values, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * 10)


def test_without_gradients_nothing_is_kept():
    hidden, head = torch.randn(40, 9), nn.Linear(9, 43).requires_grad_(False)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, torch.arange(40), head, chunk_rows=16)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference(hidden, torch.arange(40), head))


def test_chunks_are_about_equal_and_of_few_sizes():
    head, seen = nn.Linear(9, 11).requires_grad_(False), []
    head.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for num_rows in (33, 100, 101):
        chunked_cross_entropy(torch.randn(num_rows, 9), torch.arange(num_rows) % 11, head)
        chunked_cross_entropy(
            torch.randn(num_rows, 9), torch.arange(num_rows) % 11, head, chunk_rows=50
        )
    assert seen == [48, 48, 112, 64, 48, 112, 48, 48, 16]


@pytest.mark.parametrize("far", [0.0, 300.0, -300.0])
def test_few_passes_lose_no_improbable_target(far):
    logits = torch.randn(5, 341)
    targets = torch.tensor([0, 3, 340, 7, 7])
    logits[torch.arange(5), targets] += far  # by -300 its probability is zero in float32
    expected_values = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    gradient = logits.softmax(1) - torch.nn.functional.one_hot(targets, 341)
    actual = cross_entropy.losses_and_gradient(logits, targets)
    torch.testing.assert_close(actual, expected_values, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits, gradient)
