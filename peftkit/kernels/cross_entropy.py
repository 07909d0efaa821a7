"""Cross entropy whose logits are never all there at once.

The head is frozen, or nearly so: the gradient of the hidden rows can be made together with the
loss, chunk by chunk, and the logits of a chunk are gone before the next one's are made. Plain
autograd over the whole keeps four arrays of (n, V): the logits, their float32 copy, its
log-softmax, the gradient.

Shapes: n rows whose label counts, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

Head = Callable[[Tensor], Tensor]
"""(C, H) hidden rows to (C, V) logits, with all that the model does to them."""

CHUNK_BYTES = 256 << 20
"""Memory that a chunk's logits may take."""
BYTES_A_LOGIT = 12
"""float32 logits, their log-softmax and the gradient."""


def exceeds_a_chunk(num_rows: int, vocab_size: int) -> bool:
    """Tell whether so many rows would not fit into one chunk."""
    return num_rows * vocab_size * BYTES_A_LOGIT > CHUNK_BYTES


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
) -> Tensor:
    """Return the sum over rows of -log softmax(head(hidden))[target], in float32.

    Args:
        hidden: (n, H), of any float dtype.
        targets: (n,) int64.
        head: Applied to a chunk of rows at a time.
        trainable: Tensors inside `head` that get gradients.
        chunk_rows: C; by default what CHUNK_BYTES hold of a vocabulary of `vocab_size`.
    """
    rows = chunk_rows or max(256, CHUNK_BYTES // (BYTES_A_LOGIT * max(vocab_size, 1)))
    return _ChunkedCrossEntropy.apply(hidden, targets, head, rows, *trainable)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in the forward pass; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Head, chunk_rows: int, *trainable: Tensor
    ) -> Tensor:
        wants_grad = any(ctx.needs_input_grad)
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        grads = [torch.zeros_like(tensor) for tensor in trainable]
        for start in range(0, len(targets), chunk_rows):
            part = slice(start, start + chunk_rows)
            with torch.set_grad_enabled(wants_grad):
                rows = hidden[part].detach().requires_grad_(wants_grad)
                chunk_loss = reference_cross_entropy(rows, targets[part], head)
            loss += chunk_loss.detach()
            if grad_hidden is not None:
                row_grad, *own = torch.autograd.grad(chunk_loss, [rows, *trainable])
                grad_hidden[part] = row_grad
                for total, grad in zip(grads, own, strict=True):
                    total += grad
        ctx.save_for_backward(*([grad_hidden, *grads] if grad_hidden is not None else []))
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *grads = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = grad_loss
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            None,
            None,
            None,
            *(grad * scale.to(grad.dtype) for grad in grads),
        )
