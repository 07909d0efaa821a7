"""Divergence of a student's next-token distribution from a teacher's, in chunks of logits.

As in cross_entropy.py the forward pass computes the logits of both, and the gradient of the
student's hidden rows, chunk by chunk. p are the student's probabilities, q the teacher's, lp and lq
their logarithms, m = b q + (1 - b) p:

| kind    | value                         | gradient at the student's logits           |
| forward | sum q (lq - lp)               | p - q                                      |
| reverse | sum p (lp - lq)               | p (lp - lq - value)                        |
| jsd     | b KL(q, m) + (1 - b) KL(p, m) | (1 - b) p (sum p s - s), s = log(m / p)    |
|         |                               | up to a constant, which the sum takes out  |

With x = lq - lp + log(b / (1 - b)) the s of jsd is softplus(x), and log(m / q) is softplus(-x),
both up to a constant. If p and q are far apart and JSD is nearly constant, its gradient is thus not
a difference of large numbers. Everything is computed in float32 from log-softmax, without the
logarithm of a rounded probability.

Shapes: n rows, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.cross_entropy import (
    CHUNK_BYTES,
    ChunkedValues,
    Head,
    logits_of_chunk,
    parts_of,
    rows_of_chunk,
)

DivergenceName = Literal["forward", "reverse", "jsd"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A kind of divergence, the teacher's weight in jsd's mixture, and the temperature.

    Both sides' logits are divided by the temperature; the divergence is not rescaled.
    """

    kind: DivergenceName = "forward"
    beta: float = 0.5
    temperature: float = 1.0


def reference_divergence(student: Tensor, teacher: Tensor, divergence: Divergence) -> Tensor:
    """Return the divergence (n,) of logits (n, V) by its definition, for autograd."""
    lp, lq = ((logits / divergence.temperature).log_softmax(-1) for logits in (student, teacher))
    if divergence.kind == "forward":
        return (lq.exp() * (lq - lp)).sum(-1)
    if divergence.kind == "reverse":
        return (lp.exp() * (lp - lq)).sum(-1)
    b = divergence.beta
    lm = torch.logaddexp(lq + math.log(b), lp + math.log1p(-b))
    return b * (lq.exp() * (lq - lm)).sum(-1) + (1 - b) * (lp.exp() * (lp - lm)).sum(-1)


def chunked_divergence(
    student: Tensor,
    teacher: Tensor,
    head: Head,
    divergence: Divergence,
    *,
    teacher_head: Head | None = None,
    chunk_rows: int | None = None,
    vocab_size: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row (n,) in float32, and whether both choose the same token.

    Args:
        student: (n, H) hidden rows, which get the gradient; heads get none.
        teacher: (n, H) hidden rows; H may differ if `teacher_head` is given.
        teacher_head: The teacher's head, by default the student's.
        chunk_rows, vocab_size, chunk_bytes: See `chunked_cross_entropy`.
    """
    same = torch.empty(len(student), dtype=torch.bool, device=student.device)

    def measure(logits: Tensor, part: slice) -> Tensor:
        _, _, teacher_logits = logits_of_chunk(teacher[part], teacher_head or head, False)
        values, same[part] = values_and_gradient(logits, teacher_logits[: len(logits)], divergence)
        return values

    rows = rows_of_chunk(student, chunk_rows, 2 * vocab_size, chunk_bytes)
    return ChunkedValues.apply(student, head, measure, rows, False), same


@torch.no_grad()
def values_and_gradient(
    student: Tensor, teacher: Tensor, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """Return the divergence (C,), and whether the largest logits coincide (C,).

    The student's logits are overwritten by the gradient of the sum.

    Args:
        student, teacher: (C, V) logits of any float dtype.
    """
    results = [_of_chunk(s, t, divergence) for s, t in parts_of(student, teacher)]
    values, same = (torch.cat(chunks) for chunks in zip(*results, strict=True))
    return values, same


def _of_chunk(student: Tensor, teacher: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(student.dtype, torch.float32)
    same = student.argmax(-1) == teacher.argmax(-1)
    temperature = divergence.temperature
    lp, lq = (x.to(dtype).div(temperature).log_softmax(-1) for x in (student, teacher))
    values, gradient = _of_kind(lp, lq, divergence)
    student.copy_(gradient.div_(temperature))
    return values, same


def _of_kind(lp: Tensor, lq: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Return values (C,) and gradients (C, V) of log-probabilities, which are overwritten."""
    p, q = lp.exp(), lq.exp()
    if divergence.kind == "forward":
        value = lq.sub_(lp).mul_(q).sum(-1)
        gradient = p.sub_(q)
        return value + gradient.sum(-1), gradient  # 0, except for rounding of both normalisers
    if divergence.kind == "reverse":
        gap = lp.sub_(lq)
        value = (p * gap).sum(-1) + q.sub_(p).sum(-1)
        return value, _times_deviation(p, gap)
    b = divergence.beta
    x = lq.sub_(lp).add_(math.log(b) - math.log1p(-b))
    of_teacher = q.mul_(functional.softplus(-x).add_(math.log(b))).sum(-1)
    s = functional.softplus(x)
    of_student = (p * (s + math.log1p(-b))).sum(-1)
    value = -b * of_teacher - (1 - b) * of_student
    return value, _times_deviation(p, s).mul_(b - 1)


def _times_deviation(p: Tensor, gap: Tensor) -> Tensor:
    """Return p (gap - sum p gap), overwriting the gap.

    Gaps are taken relative to the likeliest token's: if its p is nearly 1, the mean is nearly its
    gap, and the difference would cancel.
    """
    gap.sub_(gap.gather(1, p.argmax(-1, keepdim=True)))
    return gap.sub_((p * gap).sum(-1, keepdim=True)).mul_(p)
