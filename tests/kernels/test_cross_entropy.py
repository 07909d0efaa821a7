"""Chunked losses and divergences are the plain ones, for every head, dtype and odd size."""

import pytest
import torch
from torch import Tensor, nn

from peftkit.kernels import cross_entropy
from peftkit.kernels.cross_entropy import (
    Divergence,
    chunked_cross_entropy,
    chunked_divergence,
    reference_divergence,
    values_and_gradient,
)
from tests.helpers.memory import use_small_chunks


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


DIVERGENCES = [
    Divergence("forward"),
    Divergence("forward", temperature=2.0),
    Divergence("reverse"),
    Divergence("reverse", temperature=0.5),
    Divergence("jsd"),
    Divergence("jsd", beta=0.1),
    Divergence("jsd", beta=0.9, temperature=2.0),
]
of_each = pytest.mark.parametrize(
    "divergence", DIVERGENCES, ids=lambda a: f"{a.kind}-{a.beta}-{a.temperature}"
)


def dense(student: Tensor, teacher: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Return values and the gradient of their sum in float64, by autograd."""
    logits = student.double().requires_grad_()
    values = reference_divergence(logits, teacher.double(), divergence)
    (gradient,) = torch.autograd.grad(values.sum(), [logits])
    return values.detach(), gradient


@of_each
@pytest.mark.parametrize("scale", [0.1, 1.0, 12.0], ids=["near", "apart", "far apart"])
def test_values_and_gradient_are_those_of_float64(divergence, scale):
    student, teacher = scale * torch.randn(2, 40, 300)
    expected, gradient = dense(student, teacher, divergence)
    actual = student.clone()
    values, same = values_and_gradient(actual, teacher, divergence)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=2e-7)
    error = (actual - gradient).abs().amax(1) / gradient.abs().amax(1)  # of each row
    assert error.max() < 1e-5
    assert torch.equal(same, student.argmax(-1) == teacher.argmax(-1))


@of_each
def test_a_teacher_that_equals_the_student_is_at_zero(divergence):
    student = 5 * torch.randn(20, 100)
    gradient = student.clone()
    values, same = values_and_gradient(gradient, student, divergence)
    assert values.abs().max() < 2e-7
    assert gradient.abs().max() < 2e-7
    assert same.all()


@of_each
def test_chunks_give_the_gradient_of_the_whole(divergence, monkeypatch):
    use_small_chunks(monkeypatch)
    head = nn.Linear(16, 50, bias=False).requires_grad_(False)
    student, teacher = torch.randn(2, 11, 16)
    student.requires_grad_()
    weights = torch.rand(11)
    values, _ = chunked_divergence(student, teacher, head, divergence, chunk_rows=4)
    (actual,) = torch.autograd.grad(values, [student], weights)
    exact = student.detach().double().requires_grad_()
    logits = exact @ head.weight.double().T
    expected = reference_divergence(logits, teacher.double() @ head.weight.double().T, divergence)
    (gradient,) = torch.autograd.grad(expected, [exact], weights.double())
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.double(), gradient, rtol=1e-5, atol=1e-6)


def test_the_teacher_may_have_a_head_and_a_width_of_its_own():
    head, other = nn.Linear(16, 50).requires_grad_(False), nn.Linear(8, 50).requires_grad_(False)
    student, teacher = torch.randn(7, 16), torch.randn(7, 8)
    divergence = Divergence("forward")
    values, _ = chunked_divergence(student, teacher, head, divergence, teacher_head=other)
    torch.testing.assert_close(
        values, reference_divergence(head(student), other(teacher), divergence)
    )


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_rows_in_16_bits_are_compared_in_32(kind):
    head = nn.Linear(16, 2000, bias=False).requires_grad_(False).to(torch.bfloat16)
    student, teacher = torch.randn(2, 9, 16, dtype=torch.bfloat16)
    values, _ = chunked_divergence(student, teacher, head, Divergence(kind))
    expected, _ = dense(head(student), head(teacher), Divergence(kind))
    assert values.dtype is torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
    assert not chunked_divergence(student, teacher, head, Divergence(kind))[0].requires_grad


def test_no_rows_are_no_values():
    head = nn.Linear(4, 5)
    empty = torch.zeros(0, 4, requires_grad=True)
    values, same = chunked_divergence(empty, empty.detach(), head, Divergence())
    assert values.shape == same.shape == (0,)
