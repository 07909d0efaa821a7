"""Log-probabilities of tokens, each with a gradient of its own, without holding all logits.

A loss that compares texts needs the log-probability of every token and gives each another weight,
known only when all are summed. But the gradient of a hidden row is its weight times the gradient of
its own log-probability: the latter is made in the forward pass, chunk by chunk, and scaled in the
backward pass. Where the head is trained too its logits are made once more in the backward pass.

Shapes: n tokens, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.cross_entropy import Head, logits_of_chunk, losses_and_gradient, rows_of_chunk


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
) -> Tensor:
    """Return log softmax(head(hidden))[target] (n,), in float32, or float64 of float64.

    Args:
        hidden, targets, head, trainable, chunk_rows, vocab_size: See `chunked_cross_entropy`.
    """
    rows = rows_of_chunk(hidden, chunk_rows, vocab_size)
    return _ChunkedLogProbs.apply(hidden, targets, head, rows, *trainable)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Head, chunk_rows: int, *trainable: Tensor
    ) -> Tensor:
        ctx.head, ctx.chunk_rows, ctx.trainable = head, chunk_rows, trainable
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        found = hidden.new_empty(len(targets), dtype=dtype)
        made = torch.empty_like(hidden) if any(ctx.needs_input_grad) and not trainable else None
        for start in range(0, len(targets), chunk_rows):
            part = slice(start, min(start + chunk_rows, len(targets)))
            num = part.stop - start
            rows, edge, logits = logits_of_chunk(hidden[part], head, made is not None)
            found[part] = -losses_and_gradient(logits[:num], targets[part])
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
            return (-kept * weights[:, None].to(kept.dtype), None, None, None)
        grad_hidden = torch.empty_like(kept)
        grads = [torch.zeros_like(tensor) for tensor in ctx.trainable]
        for start in range(0, len(targets), ctx.chunk_rows):
            part = slice(start, min(start + ctx.chunk_rows, len(targets)))
            num = part.stop - start
            rows, edge, logits = logits_of_chunk(kept[part], ctx.head, True)
            losses_and_gradient(logits[:num], targets[part])
            logits[:num] *= -weights[part, None].to(logits.dtype)
            logits[num:] = 0
            row_grad, *own = torch.autograd.grad(edge, [rows, *ctx.trainable], logits)
            grad_hidden[part] = row_grad[:num]
            for total, grad in zip(grads, own, strict=True):
                total += grad
        return (grad_hidden, None, None, None, *grads)
