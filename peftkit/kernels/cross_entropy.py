"""Cross entropy and other functions of logits in chunks, without the full (n, V) logits.

The forward pass computes the gradient of the hidden rows together with the loss, chunk by chunk,
and frees the logits of a chunk before the next. Plain autograd keeps four arrays of (n, V): the
logits, their float32 copy, its log-softmax, the gradient. Here the float32 copy of a few rows of a
chunk becomes the probabilities and then the gradient in place, and each exponential is computed
once.

A preference loss weights the log-probability of each token by a factor that depends on the sum over
all tokens. The gradient of a hidden row is this weight times the gradient of its log-probability:
the latter is computed in the forward pass and scaled in the backward pass. For a trained head the
backward pass computes the logits again.

Shapes: n rows with a target, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn import functional

Head = Callable[[Tensor], Tensor]
"""Maps (C, H) hidden rows to (C, V) logits, including the model's caps and scales."""


CHUNK_BYTES = 512 << 20
"""Memory for a chunk's logits, unless the plan sets another limit."""
BYTES_A_LOGIT = 8
"""Memory per logit: 16 bits, plus temporaries of the head and the float32 copy."""
MIN_ROWS = 384
"""Minimum rows of a chunk for an efficient matrix product of the head."""
PARTS = 8
"""Parts of a chunk's rows that are copied to float32 one after the other. A CPU's caches hold one
part (800 rows of 49,152 logits in bf16: 49 instead of 133 ms), and the copy needs less memory."""
ALIGNMENT = 16
"""C is a multiple of this: odd sizes can take twice as long, and each size compiles its own code.
"""


def chunked_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    trainable: Sequence[Tensor] = (),
    equal_weights: bool = False,
    chunk_rows: int | None = None,
    vocab_size: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return -log softmax(head(hidden))[target] (n,), in float32, or float64 for float64.

    Args:
        hidden: (n, H), of any float dtype.
        targets: (n,) int64.
        head: Applied to a chunk of rows at a time.
        trainable: Tensors inside `head` that get gradients.
        equal_weights: Whether all rows have the same weight in the loss, as in a sum: the forward
            pass can then compute the gradients of `trainable` too.
        chunk_rows: Maximum C, rounded up; by default the rows that `chunk_bytes` allows for a
            vocabulary of `vocab_size`. Chunks have about equal sizes.
    """

    def measure(logits: Tensor, chunk: slice) -> Tensor:
        return losses_and_gradient(logits, targets[chunk])

    rows = rows_of_chunk(hidden, chunk_rows, vocab_size, chunk_bytes)
    return ChunkedValues.apply(hidden, head, measure, rows, equal_weights, *trainable)


def rows_of_chunk(hidden: Tensor, max_rows: int | None, vocab_size: int, chunk_bytes: int) -> int:
    """Return C; see `chunked_cross_entropy`."""
    limit = max_rows or max(MIN_ROWS, chunk_bytes // (BYTES_A_LOGIT * max(vocab_size, 1)))
    count = max(1, -(-len(hidden) // limit))
    return max(1, -(-len(hidden) // (count * ALIGNMENT))) * ALIGNMENT


@torch.no_grad()
def losses_and_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (C,): -log softmax(logits)[target], float32; logits become the gradient of its sum.

    In place, because a second array of varying size in each step would fragment the memory. The log
    of the sum follows from the largest probability, which is at least 1 / V.

    Args:
        logits: (C, V), of any float dtype; overwritten by the gradient.
        targets: (C,) int64.
    """
    return torch.cat([_losses_of_rows(*rows) for rows in parts_of(logits, targets)])


def parts_of(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the arrays (C, ...), each of an eighth of the rows."""
    rows = max(1, -(-len(arrays[0]) // PARTS))
    return zip(*(array.split(rows) for array in arrays), strict=True)


def _losses_of_rows(logits: Tensor, targets: Tensor) -> Tensor:
    index, wide = targets[:, None], torch.promote_types(logits.dtype, torch.float32)
    target_logits = logits.gather(1, index).to(wide)
    largest, place = logits.max(1, keepdim=True)
    probs = torch.softmax(logits, 1, dtype=wide)
    log_sum = largest.to(wide) - probs.gather(1, place).log()
    losses = (log_sum - target_logits)[:, 0]
    logits.copy_(probs.scatter_add_(1, index, probs.new_full(index.shape, -1.0)))
    return losses


def logits_of_chunk(
    hidden: Tensor, head: Head, wants_grad: bool
) -> tuple[Tensor, list[GradientEdge], Tensor]:
    """Return rows (C, H), padded to ALIGNMENT, the graph edge of their logits, and the logits."""
    # a separate graph that is freed immediately: hooks that count or offload do not apply to it
    with torch.set_grad_enabled(wants_grad), saved_tensors_hooks(_same, _same):
        rows = functional.pad(hidden.detach(), (0, 0, 0, -len(hidden) % ALIGNMENT))
        logits = head(rows.requires_grad_(wants_grad))
    # before logits change in place: for a changed view autograd allocates zeros of full size
    edge = [get_gradient_edge(logits)] if wants_grad else []
    return rows, edge, logits.detach()


def _same(tensor: Tensor) -> Tensor:
    return tensor


Measure = Callable[[Tensor, slice], Tensor]
"""Maps logits (C, V) of a slice of rows to values (C,); the logits become the gradient of the sum
of these values."""


class ChunkedValues(torch.autograd.Function):
    """A value for each row (n,), with the gradient computed in forward and scaled in backward.

    The head's gradient needs the weights of all rows. Unless these are equal, the backward pass
    computes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        measure: Measure,
        chunk_rows: int,
        equal_weights: bool,
        *trainable: Tensor,
    ) -> Tensor:
        ctx.settings = head, measure, chunk_rows, trainable
        wants_grad = any(ctx.needs_input_grad)
        ctx.recomputes = wants_grad and bool(trainable) and not equal_weights
        values, *grads = _walk(hidden, ctx.settings, wants_grad and not ctx.recomputes)
        ctx.save_for_backward(*([hidden] if ctx.recomputes else grads))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = grads
        if ctx.recomputes:
            (hidden,) = ctx.saved_tensors
            _, grad_hidden, *grads_head = _walk(hidden, ctx.settings, True, weights)
        else:
            grad_hidden, *grads_head = ctx.saved_tensors
            grad_hidden = grad_hidden * weights[:, None].to(grad_hidden.dtype)
            grads_head = [grad * weights[:1].sum().to(grad.dtype) for grad in grads_head]
        return (grad_hidden, None, None, None, None, *grads_head)


def _walk(
    hidden: Tensor,
    settings: tuple[Head, Measure, int, Sequence[Tensor]],
    wants_grad: bool,
    weights: Tensor | None = None,
) -> list[Tensor]:
    """Return the values (n,); with `wants_grad` also the gradients of rows and trained tensors.

    Args:
        weights: Weight of each row (n,); None: 1.
    """
    head, measure, chunk_rows, trainable = settings
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    values = hidden.new_empty(len(hidden), dtype=dtype)
    grad_hidden = torch.empty_like(hidden) if wants_grad else None
    totals = [torch.zeros_like(tensor) for tensor in trainable]
    for start in range(0, len(hidden), chunk_rows):
        chunk = slice(start, min(start + chunk_rows, len(hidden)))
        num = chunk.stop - start
        rows, edge, logits = logits_of_chunk(hidden[chunk], head, wants_grad)
        values[chunk] = measure(logits[:num], chunk)
        if grad_hidden is None:
            continue
        if weights is not None:
            logits[:num] *= weights[chunk, None].to(logits.dtype)
        logits[num:] = 0
        grad_rows, *grads_head = torch.autograd.grad(edge, [rows, *trainable], logits)
        grad_hidden[chunk] = grad_rows[:num]
        for total, grad in zip(totals, grads_head, strict=True):
            total += grad
    return [values] if grad_hidden is None else [values, grad_hidden, *totals]


DivergenceName = Literal["forward", "reverse", "jsd"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A kind of divergence of a student from a teacher, b of jsd's mixture, and the temperature.

    Both sides' logits are divided by the temperature; the divergence is not rescaled. p are the
    student's probabilities, q the teacher's, lp and lq their logarithms, m = b q + (1 - b) p:

    | kind    | value                         | gradient at the student's logits           |
    | forward | sum q (lq - lp)               | p - q                                      |
    | reverse | sum p (lp - lq)               | p (lp - lq - value)                        |
    | jsd     | b KL(q, m) + (1 - b) KL(p, m) | (1 - b) p (sum p s - s), s = log(m / p)    |
    |         |                               | up to a constant, which the sum takes out  |

    With x = lq - lp + log(b / (1 - b)) the s of jsd is softplus(x), and log(m / q) is softplus(-x),
    both up to a constant. If p and q are far apart and JSD is nearly constant, its gradient is thus
    not a difference of large numbers. Everything is computed in float32 from log-softmax, without
    the logarithm of a rounded probability.
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
