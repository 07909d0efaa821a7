"""Encode a file in several processes, in the order of its records."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from peftkit.data.records import Dropped, Part, Record
from peftkit.data.rows.columns import columns_of
from peftkit.data.rows.encoder import INVALID, EncodedRows, RowEncoder
from peftkit.errors import DataError, RunError

POOL_PARTS = 16
"""Minimum parts of a file to start processes for."""
MAX_PROCESSES = 16


@dataclass(slots=True)
class Block:
    """Some encoded rows of a file.

    Attributes:
        batch: Arrow record batch.
        num_read: Number of records.
        first, last: Sources of the first and the last record.
        fields: Fields of the records, and whether a record used them; unused keys within them.
        agreed, shared, counts: See `EncodedRows`.
    """

    batch: Any
    num_read: int
    first: str
    last: str
    fields: dict[str, bool]
    agreed: dict[str, str]
    shared: dict[str, str]
    counts: Counter[str]


def blocks(where: str, encoder: RowEncoder, processes: int | None = None) -> Iterator[Block]:
    """Yield the rows of a file or data set in order, with few blocks in memory.

    Raises:
        DataError: Rows cannot be read or used; names the first of them.
        RunError: A process was killed.
    """
    parts = encoder.parts(where)
    first = list(islice(parts, POOL_PARTS))
    if processes is None:
        # without fork, each process would have to import all modules first
        can_fork = sys.platform not in ("win32", "darwin")
        is_large = len(first) == POOL_PARTS
        processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES) if is_large and can_fork else 1
    if processes > 1 and encoder.in_processes:
        yield from _in_processes(chain(first, parts), where, encoder, processes)
        return
    for part in chain(first, parts):
        yield from _part_blocks(part, where, encoder)


def _in_processes(
    parts: Iterable[Part], where: str, encoder: RowEncoder, processes: int
) -> Iterator[Block]:
    """Encode parts in processes, with few parts ahead of the reader."""
    columns_of(encoder.kind)  # imports pyarrow, once for all processes
    context = multiprocessing.get_context("fork")
    job = where, encoder, os.getpid()
    pool = ProcessPoolExecutor(processes, context, _start_worker, job)
    pending: deque[Future[list[Block]]] = deque()
    try:
        for part in parts:
            with warnings.catch_warnings():  # about forks with threads, which no child uses
                warnings.simplefilter("ignore", DeprecationWarning)
                pending.append(pool.submit(_encode_part, part))
            if len(pending) > 2 * processes:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool:
        raise RunError(
            f"cannot encode {where}",
            found="A process that encoded its rows was killed; memory may have run out.",
            fix="Start again with fewer other programs, or with fewer cores (taskset).",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_job: tuple[str, RowEncoder] | None = None
"""File and encoder of a worker process, inherited by the fork instead of pickled."""


def _start_worker(where: str, encoder: RowEncoder, parent: int) -> None:
    global _job
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    gc.freeze()  # a collection would write to all pages shared with the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)  # as in DataLoader workers: a fork has no other threads
    _job = where, encoder


def _end_with(parent: int) -> None:
    """End this process with its parent, whose memory and ports it would keep in use."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _encode_part(part: Part) -> list[Block]:
    assert _job is not None
    return list(_part_blocks(part, *_job))


def _part_blocks(part: Part, where: str, encoder: RowEncoder) -> Iterator[Block]:
    records = part()
    for start in range(0, len(records), encoder.at_once):
        chunk = records[start : start + encoder.at_once]
        if encoder.drops_invalid:
            rows = _valid_rows(chunk, where, encoder)
        else:
            rows = encoder.encode_records(chunk, where)
        unused = {*rows.unused}
        yield Block(
            batch=columns_of(encoder.kind).batch(where, rows.rows, encoder.reasons),
            num_read=len(chunk),
            first=chunk[0].source,
            last=chunk[-1].source,
            fields={name: name not in unused for record in chunk for name in record.fields}
            | dict.fromkeys(rows.unused, False),
            agreed=rows.agreed,
            shared=rows.shared,
            counts=rows.counts,
        )


def _valid_rows(records: Sequence[Record], where: str, encoder: RowEncoder) -> EncodedRows:
    """Encode records one by one; drop invalid records, and records of another format."""
    whole, used, shared = EncodedRows([]), set[str](), list[set[tuple[str, str]]]()
    for record in records:
        try:
            one = encoder.encode_records([record], where)
        except DataError:
            one = EncodedRows([Dropped(record.source, INVALID)])
        if any(whole.agreed.get(name, value) != value for name, value in one.agreed.items()):
            one = EncodedRows([Dropped(record.source, INVALID)])
        whole.rows += one.rows
        whole.agreed |= one.agreed
        whole.counts.update(one.counts)
        if not all(isinstance(row, Dropped) for row in one.rows):
            shared.append({*one.shared.items()})
            used |= record.fields.keys() - set(one.unused)
            whole.unused += one.unused
    whole.unused = tuple(name for name in dict.fromkeys(whole.unused) if name not in used)
    whole.shared = dict(set.intersection(*shared)) if shared else {}
    return whole
