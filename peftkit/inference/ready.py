"""Prepare a model for generation, and restore it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftkit.adapter import prepared_for_serving
from peftkit.execution.environment import free_now
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.loss import find_head
from peftkit.model.blocks import is_sharded, is_streamed
from peftkit.quant.layers import copies_kept

COPY_SHARE, GPU_COPY_SHARE = 0.5, 0.25
"""Share of the free memory for unpacked copies. On a GPU, keys and values need the rest."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a CUDA device is this thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def ready_for_tokens(model: PreTrainedModel) -> Iterator[Callable[[], bool]]:
    """Prepare weights for many short forward passes: unpacked copies, A and B grouped.

    Yields:
        A function that drops the copies, and returns whether there were any.
    """
    free = free_now(model.device)
    share = GPU_COPY_SHARE if free.on_gpu else COPY_SHARE
    if is_sharded(model) or is_streamed(model):  # streamed weights rest on the CPU
        share = 0.0
    with (
        copies_kept(model, share * free.usable) as drop_copies,
        prepared_for_serving(model, ExecutionPlan.for_model(model)),
        _rows_for_the_head(model),
    ):
        yield drop_copies


@contextmanager
def _rows_for_the_head(model: PreTrainedModel) -> Iterator[None]:
    """Make the hidden rows contiguous before the head.

    transformers slices the last ones out of a prompt's, a view with gaps; torch's product of such a
    view with a weight copies the weight for each row of the batch.
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
