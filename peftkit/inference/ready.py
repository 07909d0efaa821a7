"""A model made ready to be called for token after token; then it is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from peftkit.execution.plan import plan_of
from peftkit.kernels.packing import copies_kept
from peftkit.model.modes import prepared_for_serving
from peftkit.tasks.loss import find_head
from peftkit.train.sharding import is_sharded

COPY_SHARE = 0.5
"""Of the free main memory that unpacked weights may take meanwhile."""


@contextmanager
def ready_for_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Have ready within the context what each token needs: unpacked weights, A and B as copies."""
    share = 0.0 if is_sharded(model) else COPY_SHARE
    with (
        copies_kept(model, share),
        prepared_for_serving(model, plan_of(model)),
        _rows_for_the_head(model),
    ):
        yield


@contextmanager
def _rows_for_the_head(model: PreTrainedModel) -> Iterator[None]:
    """Give the head rows that lie one after the other.

    Of a prompt's hidden rows transformers takes the last ones, as a view with gaps; torch's product
    of such a view with a weight copies the weight for each row of the batch.
    """
    head = find_head(model)
    if head is None:
        yield
        return

    def joined(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args)

    handle = head.register_forward_pre_hook(joined)
    try:
        yield
    finally:
        handle.remove()
