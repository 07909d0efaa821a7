"""Divergences chunk by chunk are the definition in float64, values and gradients."""

import pytest
import torch
from torch import Tensor, nn

from peftkit.kernels.cross_entropy import (
    Divergence,
    chunked_divergence,
    reference_divergence,
    values_and_gradient,
)
from tests.helpers.memory import use_small_chunks

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
