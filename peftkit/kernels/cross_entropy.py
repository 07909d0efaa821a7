"""Cross entropy, and log-probabilities of tokens, whose logits are never all there at once.

The head is frozen, or nearly so: the gradient of the hidden rows can be made together with the
loss, chunk by chunk, and the logits of a chunk are gone before the next one's are made. Plain
autograd over the whole keeps four arrays of (n, V): the logits, their float32 copy, its
log-softmax, the gradient. Here the float32 copy becomes the probabilities and then the gradient in
place, and each exponential is taken once.

A loss that compares texts needs the log-probability of every token and gives each another weight,
known only when all are summed. But the gradient of a hidden row is its weight times the gradient of
its own log-probability: the latter is made in the forward pass and scaled in the backward pass.
Where the head is trained too, its logits are made once more in the backward pass.

Shapes: n rows whose label counts, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn import functional

Head = Callable[[Tensor], Tensor]
"""(C, H) hidden rows to (C, V) logits, with all that the model does to them."""


@dataclass(frozen=True, slots=True)
class LossChunks:
    """How much of the logits is there at once.

    Attributes:
        num_bytes: Memory that a chunk's logits may take.
        wide_bytes: Float32 rows made at a time, so that they stay in a CPU's caches; None: all of a
            chunk are, in fewer passes over it.
        first_part_only: Compute the first part of each chunk alone, where tensors have no data.
    """

    num_bytes: int
    wide_bytes: int | None = None
    first_part_only: bool = False


CHUNKS = LossChunks(512 << 20)
BYTES_A_LOGIT = 8
"""The logits in 16 bits, and what the head and the float32 copy take while they are made."""
MIN_ROWS = 384
"""Fewer rows to a chunk would leave the head's matrix product idle."""
ALIGNMENT = 16
"""C is one of this: of some odd sizes the product takes twice as long, and keeps code for each."""


def reference_cross_entropy(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Return the sum of the rows' losses by the definition."""
    return functional.cross_entropy(head(hidden).float(), targets, reduction="sum")


def chunked_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    trainable: Sequence[Tensor] = (),
    chunk_rows: int | None = None,
    vocab_size: int = 0,
    sizes: Sequence[int] = (),
    chunks: LossChunks = CHUNKS,
) -> Tensor:
    """Return the sum over rows of -log softmax(head(hidden))[target], in float32.

    With `sizes` the sum of each piece, (pieces,): all rows go through the head together.

    Args:
        hidden: (n, H), of any float dtype.
        targets: (n,) int64.
        head: Applied to a chunk of rows at a time.
        trainable: Tensors inside `head` that get gradients.
        chunk_rows: The largest C, rounded up; by default what `chunks` allow of a vocabulary of
            `vocab_size`. Chunks are about equal.
        sizes: Rows of each piece, n in all; several only where nothing is `trainable`.
    """
    if trainable and len(sizes) > 1:
        raise ValueError("a head's own gradient is not told apart by pieces")
    rows = rows_of_chunk(hidden, chunk_rows, vocab_size, chunks)
    pieces = tuple(sizes) or (len(targets),)
    sums = _ChunkedCrossEntropy.apply(hidden, targets, head, rows, chunks, pieces, *trainable)
    return sums if sizes else sums[0]


def rows_of_chunk(hidden: Tensor, most: int | None, vocab_size: int, chunks: LossChunks) -> int:
    """Return C; see `chunked_cross_entropy`."""
    most = most or max(MIN_ROWS, chunks.num_bytes // (BYTES_A_LOGIT * max(vocab_size, 1)))
    count = max(1, -(-len(hidden) // most))
    return max(1, -(-len(hidden) // (count * ALIGNMENT))) * ALIGNMENT


@torch.no_grad()
def losses_and_gradient(logits: Tensor, targets: Tensor, chunks: LossChunks) -> Tensor:
    """Return (C,): -log softmax(logits)[target], float32; logits become the gradient of its sum.

    In their place: a second array as large, made and freed in each step with another number of
    rows, leaves holes in the memory that nothing fills.

    Args:
        logits: (C, V), of any float dtype, which is also the gradient's.
        targets: (C,) int64.
    """
    if chunks.wide_bytes is None:
        return _in_few_passes(logits, targets)
    rows = max(1, chunks.wide_bytes // (4 * logits.shape[1]))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = logits.new_empty(len(logits), dtype=dtype)
    scratch = torch.empty_like(logits[:rows], dtype=dtype)  # one, whose pages are there
    for start in range(0, rows if chunks.first_part_only else len(logits), rows):
        part = slice(start, start + rows)
        index = targets[part, None]
        wide = scratch[: len(index)].copy_(logits[part])
        largest = wide.amax(1, keepdim=True)
        chosen = wide.gather(1, index) - largest
        total = wide.sub_(largest).exp_().sum(1, keepdim=True)
        losses[part] = (total.log() - chosen)[:, 0]
        logits[part] = wide.div_(total).scatter_add_(1, index, wide.new_full(index.shape, -1.0))
    return losses


def logits_of_chunk(
    hidden: Tensor, head: Head, wants_grad: bool
) -> tuple[Tensor, list[GradientEdge], Tensor]:
    """Return rows (C, H), padded to ALIGNMENT, where their logits begin in the graph, and these."""
    # a graph of its own, gone at once: hooks that count or offload do not apply to it
    with torch.set_grad_enabled(wants_grad), saved_tensors_hooks(_same, _same):
        rows = functional.pad(hidden.detach(), (0, 0, 0, -len(hidden) % ALIGNMENT))
        logits = head(rows.requires_grad_(wants_grad))
    # before logits change: through a changed view autograd goes by zeros of the size of all
    edge = [get_gradient_edge(logits)] if wants_grad else []
    return rows, edge, logits.detach()


def _in_few_passes(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the same where memory is what is slow: 18 bytes are read and written a logit, not 44.

    The log of the sum follows from the largest probability, which is never below 1 / V.
    """
    index = targets[:, None]
    chosen = logits.gather(1, index).float()
    largest, place = logits.max(1, keepdim=True)
    probs = torch.softmax(logits, 1, dtype=torch.float32)
    log_sum = largest.float() - probs.gather(1, place).log()
    losses = (log_sum - chosen)[:, 0]
    logits.copy_(probs.scatter_add_(1, index, probs.new_full(index.shape, -1.0)))
    return losses


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in the forward pass; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: Head,
        chunk_rows: int,
        chunks: LossChunks,
        sizes: tuple[int, ...],
        *trainable: Tensor,
    ) -> Tensor:
        wants_grad = any(ctx.needs_input_grad)
        losses = hidden.new_zeros(len(hidden), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        grads = [torch.zeros_like(tensor) for tensor in trainable]
        for start in range(0, len(targets), chunk_rows):
            part = slice(start, min(start + chunk_rows, len(targets)))
            num = part.stop - start
            rows, edge, grad_logits = logits_of_chunk(hidden[part], head, wants_grad)
            losses[part] = losses_and_gradient(grad_logits[:num], targets[part], chunks)
            grad_logits[num:] = 0
            if grad_hidden is not None:
                row_grad, *own = torch.autograd.grad(edge, [rows, *trainable], grad_logits)
                grad_hidden[part] = row_grad[:num]
                for total, grad in zip(grads, own, strict=True):
                    total += grad
        ctx.save_for_backward(*([grad_hidden, *grads] if grad_hidden is not None else []))
        ctx.sizes = sizes
        return torch.stack([piece.sum() for piece in losses.split(list(sizes))])

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *grads = ctx.saved_tensors
        parts = zip(grad_hidden.split(list(ctx.sizes)), grad_sums, strict=True)
        scaled = [part * scale.to(part.dtype) for part, scale in parts]
        return (
            torch.cat(scaled) if len(scaled) > 1 else scaled[0],
            None,
            None,
            None,
            None,
            None,
            *(grad * grad_sums[0].to(grad.dtype) for grad in grads),
        )


def reference_log_probs(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Return the log-probability of each target (n,) by the definition."""
    return -functional.cross_entropy(head(hidden).float(), targets, reduction="none")


def chunked_log_probs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    trainable: Sequence[Tensor] = (),
    chunk_rows: int | None = None,
    vocab_size: int = 0,
    chunks: LossChunks = CHUNKS,
) -> Tensor:
    """Return log softmax(head(hidden))[target] (n,), in float32, or float64 of float64.

    Args:
        hidden, targets, head, trainable, chunk_rows, vocab_size, chunks: As in
            `chunked_cross_entropy`.
    """
    rows = rows_of_chunk(hidden, chunk_rows, vocab_size, chunks)
    return _ChunkedLogProbs.apply(hidden, targets, head, rows, chunks, *trainable)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: Head,
        chunk_rows: int,
        chunks: LossChunks,
        *trainable: Tensor,
    ) -> Tensor:
        ctx.head, ctx.chunk_rows, ctx.chunks, ctx.trainable = head, chunk_rows, chunks, trainable
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        found = hidden.new_empty(len(targets), dtype=dtype)
        made = torch.empty_like(hidden) if any(ctx.needs_input_grad) and not trainable else None
        for start in range(0, len(targets), chunk_rows):
            part = slice(start, min(start + chunk_rows, len(targets)))
            num = part.stop - start
            rows, edge, logits = logits_of_chunk(hidden[part], head, made is not None)
            found[part] = -losses_and_gradient(logits[:num], targets[part], chunks)
            if made is not None:
                logits[num:] = 0
                (grad,) = torch.autograd.grad(edge, [rows], logits)
                made[part] = grad[:num]
        ctx.save_for_backward(hidden if made is None else made, targets)
        return found

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        kept, targets = ctx.saved_tensors
        if not ctx.trainable:
            return (-kept * weights[:, None].to(kept.dtype), None, None, None, None)
        grad_hidden = torch.empty_like(kept)
        grads = [torch.zeros_like(tensor) for tensor in ctx.trainable]
        for start in range(0, len(targets), ctx.chunk_rows):
            part = slice(start, min(start + ctx.chunk_rows, len(targets)))
            num = part.stop - start
            rows, edge, logits = logits_of_chunk(kept[part], ctx.head, True)
            losses_and_gradient(logits[:num], targets[part], ctx.chunks)
            logits[:num] *= -weights[part, None].to(logits.dtype)
            logits[num:] = 0
            row_grad, *own = torch.autograd.grad(edge, [rows, *ctx.trainable], logits)
            grad_hidden[part] = row_grad[:num]
            for total, grad in zip(grads, own, strict=True):
                total += grad
        return (grad_hidden, None, None, None, None, *grads)
