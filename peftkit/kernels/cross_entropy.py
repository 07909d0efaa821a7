"""Cross entropy, and other functions of logits, in chunks: (n, V) logits never exist at once.

The forward pass computes the gradient of the hidden rows together with the loss, chunk by chunk,
and frees the logits of a chunk before the next. Plain autograd keeps four arrays of (n, V): the
logits, their float32 copy, its log-softmax, the gradient. Here the float32 copy, of a part of a
chunk's rows at a time, becomes the probabilities and then the gradient in place, and each
exponential is taken once.

A preference loss weights the log-probability of every token by a factor that is known only once all
are summed. The gradient of a hidden row is this weight times the gradient of its log-probability:
the latter is computed in the forward pass and scaled in the backward pass. For a trained head the
backward pass computes its logits once more.

Shapes: n rows whose label counts, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn import functional

Head = Callable[[Tensor], Tensor]
"""(C, H) hidden rows to (C, V) logits, with all that the model does to them."""


CHUNK_BYTES = 512 << 20
"""Memory that a chunk's logits may take, where the plan says nothing else."""
BYTES_A_LOGIT = 8
"""The logits in 16 bits, and what the head and the float32 copy take while they are made."""
MIN_ROWS = 384
"""Fewer rows to a chunk would leave the head's matrix product idle."""
PARTS = 8
"""The float32 copy is of so many parts of a chunk's rows, one after the other: a CPU's caches hold
one (800 rows of 49,152 logits in bf16: 49 instead of 133 ms), and no device has all of it at once.
"""
ALIGNMENT = 16
"""C is a multiple of this: odd sizes may take twice as long, and each has its code compiled."""


def reference_cross_entropy(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Return the rows' losses (n,) by the definition."""
    return functional.cross_entropy(head(hidden).float(), targets, reduction="none")


def chunked_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    trainable: Sequence[Tensor] = (),
    alike: bool = False,
    chunk_rows: int | None = None,
    vocab_size: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return -log softmax(head(hidden))[target] (n,), in float32, or float64 of float64.

    Args:
        hidden: (n, H), of any float dtype.
        targets: (n,) int64.
        head: Applied to a chunk of rows at a time.
        trainable: Tensors inside `head` that get gradients.
        alike: All rows have the same weight in the loss, as in a sum: the forward pass can then
            compute the gradients of `trainable` too.
        chunk_rows: The largest C, rounded up; by default as many rows as `chunk_bytes` allow with a
            vocabulary of `vocab_size`. Chunks are about equal.
    """

    def measure(logits: Tensor, part: slice) -> Tensor:
        return losses_and_gradient(logits, targets[part])

    rows = rows_of_chunk(hidden, chunk_rows, vocab_size, chunk_bytes)
    return ChunkedValues.apply(hidden, head, measure, rows, alike, *trainable)


def rows_of_chunk(hidden: Tensor, max_rows: int | None, vocab_size: int, chunk_bytes: int) -> int:
    """Return C; see `chunked_cross_entropy`."""
    limit = max_rows or max(MIN_ROWS, chunk_bytes // (BYTES_A_LOGIT * max(vocab_size, 1)))
    count = max(1, -(-len(hidden) // limit))
    return max(1, -(-len(hidden) // (count * ALIGNMENT))) * ALIGNMENT


@torch.no_grad()
def losses_and_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (C,): -log softmax(logits)[target], float32; logits become the gradient of its sum.

    In place: a second array of varying size, allocated in each step, would fragment the memory. The
    log of the sum follows from the largest probability, which is at least 1 / V.

    Args:
        logits: (C, V), of any float dtype; overwritten by the gradient.
        targets: (C,) int64.
    """
    return torch.cat([_of_part(*part) for part in parts_of(logits, targets)])


def parts_of(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of an eighth of the rows of arrays (C, ...), one after the other."""
    rows = max(1, -(-len(arrays[0]) // PARTS))
    return zip(*(array.split(rows) for array in arrays), strict=True)


def _of_part(logits: Tensor, targets: Tensor) -> Tensor:
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
    # a graph of its own, gone at once: hooks that count or offload do not apply to it
    with torch.set_grad_enabled(wants_grad), saved_tensors_hooks(_same, _same):
        rows = functional.pad(hidden.detach(), (0, 0, 0, -len(hidden) % ALIGNMENT))
        logits = head(rows.requires_grad_(wants_grad))
    # before logits change in place: through a changed view autograd allocates zeros of full size
    edge = [get_gradient_edge(logits)] if wants_grad else []
    return rows, edge, logits.detach()


def _same(tensor: Tensor) -> Tensor:
    return tensor


Measure = Callable[[Tensor, slice], Tensor]
"""Logits (C, V) of some of the rows to a value of each, (C,); the logits become the gradient of
their sum."""


class ChunkedValues(torch.autograd.Function):
    """A value of each row (n,), with the gradient computed in forward and scaled in backward.

    The head's gradient needs the weights of all rows. Unless these are equal, the backward pass
    computes the logits once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        measure: Measure,
        chunk_rows: int,
        alike: bool,
        *trainable: Tensor,
    ) -> Tensor:
        ctx.settings = head, measure, chunk_rows, trainable
        wants_grad = any(ctx.needs_input_grad)
        ctx.recomputes = wants_grad and bool(trainable) and not alike
        values, *grads = _walk(hidden, ctx.settings, wants_grad and not ctx.recomputes)
        ctx.save_for_backward(*([hidden] if ctx.recomputes else grads))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = grads
        of_hidden, *of_trained = ctx.saved_tensors
        if ctx.recomputes:
            _, of_hidden, *of_trained = _walk(of_hidden, ctx.settings, True, weights)
        else:
            of_hidden = of_hidden * weights[:, None].to(of_hidden.dtype)
            of_trained = [grad * weights[:1].sum().to(grad.dtype) for grad in of_trained]
        return (of_hidden, None, None, None, None, *of_trained)


def _walk(
    hidden: Tensor,
    settings: tuple[Head, Measure, int, Sequence[Tensor]],
    wants_grad: bool,
    weights: Tensor | None = None,
) -> list[Tensor]:
    """Return the values (n,); with `wants_grad` also the gradients of rows and trained tensors.

    Args:
        weights: Weight (n,) of each row; None: one.
    """
    head, measure, chunk_rows, trainable = settings
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    values = hidden.new_empty(len(hidden), dtype=dtype)
    of_hidden = torch.empty_like(hidden) if wants_grad else None
    totals = [torch.zeros_like(tensor) for tensor in trainable]
    for start in range(0, len(hidden), chunk_rows):
        part = slice(start, min(start + chunk_rows, len(hidden)))
        num = part.stop - start
        rows, edge, logits = logits_of_chunk(hidden[part], head, wants_grad)
        values[part] = measure(logits[:num], part)
        if of_hidden is None:
            continue
        if weights is not None:
            logits[:num] *= weights[part, None].to(logits.dtype)
        logits[num:] = 0
        of_rows, *of_trained = torch.autograd.grad(edge, [rows, *trainable], logits)
        of_hidden[part] = of_rows[:num]
        for total, grad in zip(totals, of_trained, strict=True):
            total += grad
    return [values] if of_hidden is None else [values, of_hidden, *totals]
