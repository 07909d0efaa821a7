"""Rows in batches that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.data.pack import num_tokens, tokens_of_each
from peftkit.errors import RunError
from peftkit.events import Listener, Progress, ignore
from peftkit.execution.out_of_memory import is_out_of_memory, release_memory
from peftkit.tasks.training import Task

BATCH_SIZE = 8
_FIX = "Cut the rows (data.max_length), or load the base quantised (nf4)."


TOO_LARGE = (
    "Lower data.max_length, set train.gradient_checkpointing: auto, or quantise the base "
    "(base.quantize: nf4)."
)


def too_large(
    row: Any, rows: Sequence[Any], fits: Callable[[Any], bool], *, fix: str = TOO_LARGE
) -> RunError:
    """Return the error for a row that does not fit by itself, saying how long a row may be.

    Args:
        rows: Others to try, of which the longest that fits is searched by bisection.
        fits: Tries a row.
    """
    asked = f"one row alone does not fit into memory: {getattr(row, 'source', 'row')}"
    length = num_tokens(row)
    by_length = {num_tokens(other): other for other in rows if 0 < num_tokens(other) < length}
    candidates = sorted(by_length)
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if fits(by_length[candidates[middle]]):
            low = middle + 1
        else:
            high = middle
    found = f"It has {length:,} tokens." if length else ""
    if low:
        found += f" Rows of {candidates[low - 1]:,} tokens would fit."
    elif candidates:
        found += f" Not even the shortest row, of {candidates[0]:,} tokens, would fit."
    return RunError(asked, found=found, fix=fix)


def split_micro_batches(
    rows: Sequence[Any],
    num_positions: Callable[[Sequence[Any]], int],
    max_rows: int,
    max_tokens: int | None = None,
    bucket_key: Callable[[Any], Any] | None = None,
) -> list[Sequence[Any]]:
    """Return rows in micro-batches of at most so many rows and tokens, padding included.

    They keep their order unless that has too many tokens. Then they are sorted, the longest first:
    rows of a length lie together, and where memory does not suffice, that shows at once. One row
    alone may have more tokens.

    Args:
        num_positions: Tokens of rows that go through the model at once, padding included.
        bucket_key: Rows of different kinds share no micro-batch.
    """
    if bucket_key is not None:
        groups: dict[Any, list[Any]] = {}
        for row in rows:
            groups.setdefault(bucket_key(row), []).append(row)
        return [
            part
            for group in groups.values()
            for part in split_micro_batches(group, num_positions, max_rows, max_tokens)
        ]
    parts = [rows[start : start + max_rows] for start in range(0, len(rows), max_rows)]
    if max_tokens is None or all(num_positions(part) <= max_tokens for part in parts):
        return parts
    fitting: list[Sequence[Any]] = [[]]
    for row in sorted(rows, key=lambda row: num_positions([row]), reverse=True):
        part = [*fitting[-1], row]
        if len(part) == 1 or (len(part) <= max_rows and num_positions(part) <= max_tokens):
            fitting[-1] = part
        else:
            fitting.append([row])
    return fitting


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
