"""What most metrics begin with: rows as batches where the model is, shortest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.pack import tokens_of_each
from peftkit.events import Listener, Progress, ignore
from peftkit.train.batches import split_micro_batches
from peftkit.train.memory.out_of_memory import is_out_of_memory, release_memory, too_large
from peftkit.train.task import Task

BATCH_SIZE = 8
_FIX = "Cut the rows (data.max_length), or load the base quantised (nf4)."


@torch.no_grad()
def mean_metrics(
    task: Task, model: nn.Module, rows: Sequence[Any], on_event: Listener = ignore
) -> tuple[dict[str, float], int]:
    """Return the mean loss of rows with what is told at each step of training, and the targets."""
    total, num_targets = torch.zeros(1 + task.num_metrics, dtype=torch.float64), 0
    compute = partial(task.loss_and_metric_sums, model)
    for _, batch, sums in over_batches(task, model, rows, "Measuring", on_event, compute):
        total += sums.cpu()
        num_targets += task.num_targets(batch)
    loss, *means = (total / num_targets).tolist()
    return {"loss": loss, **task.metric_means(means)}, num_targets


def over_batches(
    task: Task,
    model: nn.Module,
    rows: Sequence[Any],
    text: str,
    on_event: Listener,
    compute: Callable[[Mapping[str, Tensor]], Tensor],
) -> Iterator[tuple[Sequence[Any], Mapping[str, Tensor], Tensor]]:
    """Yield rows, shortest first, their batch where the model is, and what is computed of it.

    Batches that do not fit into memory are halved, they and those after them.

    Args:
        text: Of the progress.
        compute: Makes the logits, or the loss, of a batch.

    Raises:
        RunError: Not even one row fits.
    """
    device = next(model.parameters()).device
    order = tokens_of_each(rows).sort(stable=True).indices.tolist()  # little padding
    parts = split_micro_batches(
        order, len, len(order), bucket_key=lambda n: task.bucket_key(rows[n])
    )
    order = [n for part in parts for n in part]

    def attempt(some: Sequence[Any]) -> tuple[Mapping[str, Tensor], Tensor] | None:
        batch = {name: tensor.to(device) for name, tensor in task.collate(some).items()}
        try:
            return batch, compute(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    start, size = 0, BATCH_SIZE
    while start < len(order):
        on_event(Progress(text, start, len(order)))
        some = [rows[n] for n in order[start : start + size]]
        kind = task.bucket_key(some[0])
        some = list(takewhile(lambda row: task.bucket_key(row) == kind, some))  # noqa: B023
        done = attempt(some)
        if done is not None:
            yield some, *done
            start += len(some)
            continue
        release_memory()
        if len(some) == 1:
            fits = lambda row: attempt([row]) is not None  # noqa: E731
            raise too_large(some[0], rows, fits, fix=_FIX)
        size = len(some) // 2
