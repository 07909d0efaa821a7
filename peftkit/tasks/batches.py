"""Rows in batches that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from peftkit.data.rows.lazy import num_tokens
from peftkit.errors import RunError
from peftkit.execution.out_of_memory import attempt, is_out_of_memory
from peftkit.execution.world import Parallel, Part, Rows

T = TypeVar("T")

BATCH_SIZE = 8
"""Rows of a batch if nothing is trained."""

TOO_LARGE = (
    "Lower data.max_length, set train.gradient_checkpointing: auto, or quantise the base "
    "(base.quantize: nf4) and, on a GPU, stream it (base.placement: stream)."
)


class RowTooLarge(RunError):
    """A single row does not fit into memory."""


def too_large(
    row: object, rows: Rows, fits: Callable[[object], bool], *, fix: str = TOO_LARGE
) -> RowTooLarge:
    """Return the error for a single row that does not fit, with the longest length that fits.

    Args:
        rows: Candidates; a bisection finds the longest that fits.
        fits: Tries a row.
    """
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
    size = f"It has {length:,} tokens." if length else ""
    if low:
        size += f" Rows of {candidates[low - 1]:,} tokens would fit."
    elif candidates:
        size += f" Not even the shortest row, of {candidates[0]:,} tokens, would fit."
    return RowTooLarge(
        f"a single row does not fit into memory: {getattr(row, 'source', 'row')}",
        found=size,
        fix=fix,
    )


def equal_parts(rows: Rows, size: int) -> list[Part]:
    """Return rows in parts of `size`, the last one possibly smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def split_micro_batches(
    rows: Rows,
    num_positions: Callable[[Rows], int],
    max_rows: int,
    max_tokens: int | None = None,
    bucket_key: Callable[[Any], object] | None = None,
) -> list[Rows]:
    """Return rows in micro-batches of at most `max_rows` and `max_tokens`, padding included.

    If the given order exceeds `max_tokens`, rows are sorted, longest first: neighbours then have
    similar lengths, and the first micro-batch shows whether memory suffices. A single row may
    exceed the limit.

    Args:
        num_positions: Returns the tokens of a micro-batch, padding included.
        bucket_key: Rows with different keys share no micro-batch; None: all rows may.
    """
    if bucket_key is not None and len(rows) and bucket_key(rows[0]) is not None:
        groups: dict[Any, list[Any]] = {}
        for row in rows:
            groups.setdefault(bucket_key(row), []).append(row)
        return [
            part
            for group in groups.values()
            for part in split_micro_batches(group, num_positions, max_rows, max_tokens)
        ]
    parts = equal_parts(rows, max_rows)
    if max_tokens is None or all(num_positions(part) <= max_tokens for part in parts):
        return parts
    fitting: list[Rows] = [[]]
    for row in sorted(rows, key=lambda row: num_positions([row]), reverse=True):
        part = [*fitting[-1], row]
        if len(part) == 1 or (len(part) <= max_rows and num_positions(part) <= max_tokens):
            fitting[-1] = part
        else:
            fitting.append([row])
    return fitting


class OnDevice(Mapping[str, Tensor]):
    """A batch on a device; each tensor is moved once, when it is first read.

    Attributes:
        host: The batch as collated, on the CPU.
    """

    def __init__(self, batch: Mapping[str, Tensor], device: torch.device) -> None:
        self.host, self._device = batch, device
        self._moved: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._moved:
            tensor = self.host[name]
            self._moved[name] = tensor.to(self._device, non_blocking=tensor.is_pinned())
        return self._moved[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.host)

    def __len__(self) -> int:
        return len(self.host)


def on_host(batch: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of a batch on the CPU, without synchronizing with the device."""
    return batch.host[name] if isinstance(batch, OnDevice) else batch[name]


def batches_that_fit(
    rows: Rows,
    size: int,
    split: Callable[[Rows, int], Sequence[Part]],
    compute: Callable[[Part], T],
    *,
    parallel: Parallel | None = None,
    fix: str = TOO_LARGE,
    on_fewer: Callable[[int], None] = lambda size: None,
    ahead: Callable[[Part], None] = lambda part: None,
    is_shared: bool = False,
) -> Iterator[tuple[Part, T, bool]]:
    """Yield each batch of rows, its result, and whether the rows belong to this process.

    If a batch runs out of memory, it and all later batches are retried with half as many rows.
    With several processes, all must call this function; see `Parallel.align`.

    Args:
        size: Initial batch size.
        split: Splits rows into batches of at most a given size.
        fix: Advice for a single row that does not fit.
        on_fewer: Called with the new size after memory ran out.
        ahead: Called with each batch while the batch before it is computed.
        is_shared: Whether processes share the model without aligning their batches. Running out
            of memory then raises, because all processes would have to halve together.

    Raises:
        RunError: A single row does not fit.
    """

    def can_halve(error: Exception) -> bool:
        ran_out = is_out_of_memory(error) if parallel is None else parallel.ran_out(error)
        return ran_out and not is_shared

    def result_of(part: Part) -> T | None:
        return attempt(lambda: compute(part), can_halve)

    def aligned(rest: Rows) -> list[tuple[Part, bool]]:
        parts = split(rest, size)
        return [(part, True) for part in parts] if parallel is None else parallel.align(parts)

    pending = aligned(rows)
    for part, _ in pending[:1]:
        ahead(part)
    while pending:
        part, is_local = pending[0]
        for next_part, _ in pending[1:2]:
            ahead(next_part)
        result = result_of(part)
        if result is not None:
            pending.pop(0)
            yield part, result, is_local
            continue
        if len(part) == 1:
            raise too_large(part[0], rows, lambda row: result_of([row]) is not None, fix=fix)
        size = len(part) // 2
        on_fewer(size)
        pending = aligned([row for part, is_local in pending if is_local for row in part])
