"""A file's rows as columns, a block at a time, in several processes where that pays.

Only what is in hand is in memory: a block of records is read, given its meaning, encoded, and
handed on in the order of the file.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from peftkit.data import load
from peftkit.data.columns import columns_of
from peftkit.data.load import Part, Record
from peftkit.errors import RunError

POOL_PARTS = 16
"""A file of at least so many parts is worth starting processes for."""
MAX_PROCESSES = 16


@dataclass(slots=True)
class EncodedRows:
    """What records became.

    Attributes:
        rows: In the order of the records: rows, and `Dropped` for those that became none.
        agreed: What all of a file's rows have in common, by name: their format.
        counts: What is added up over the file, by name.
        unused: Fields that none of the records needed.
    """

    rows: list[Any]
    agreed: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()


class RowEncoder(ABC):
    """How a task makes rows of records: all of it that does not need the model.

    Attributes:
        kind: The rows' class, a dataclass; see columns.py.
        in_processes: Whether several processes may encode a file.
        at_once: Records that are encoded before progress is told.
        drops: Why a record becomes no row, and what may be done instead; a `Dropped.why` is the
            number of one of them.
    """

    kind: ClassVar[type[Any]]
    in_processes: ClassVar[bool] = True
    at_once: ClassVar[int] = 1_000
    drops: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def key(self, where: str) -> object:
        """Return all that rows depend on beside the bytes of their file and the code."""

    @abstractmethod
    def read(self, records: Sequence[Record], where: str) -> Any:
        """Give records their meaning; knows nothing of tokens.

        Raises:
            DataError: Names the first few of those that cannot be used.
        """

    @abstractmethod
    def rows(self, read: Any) -> EncodedRows:
        """Encode what `read` returned."""

    def parts(self, where: str) -> Iterator[Part]:
        """Yield what reads some records each, in the order of the file."""
        return load.parts(where)

    def stamp(self, where: str) -> object | None:
        """Return what changes when rows that are no file do; None where nothing says it."""
        return load.stamp_of(where)

    def made(self, records: Sequence[Record], where: str) -> EncodedRows:
        """Return the rows of some records."""
        return self.rows(self.read(records, where))


@dataclass(slots=True)
class Block:
    """Some rows of a file, encoded.

    Attributes:
        batch: Arrow's. num_read: Records. first, last: Sources of the first and the last of them.
        names: Fields that the records have. agreed, counts, unused: See `EncodedRows`.
    """

    batch: Any
    num_read: int
    first: str
    last: str
    names: tuple[str, ...]
    agreed: dict[str, str]
    counts: Counter[str]
    unused: tuple[str, ...]


def blocks(where: str, encoder: RowEncoder, processes: int | None = None) -> Iterator[Block]:
    """Yield the rows of a file or data set, encoded, in their order.

    Args:
        processes: How many encode; by default as many as there are cores for a large file, else 1.

    Raises:
        DataError: Rows cannot be read or used; names the first of them.
        RunError: A process was killed.
    """
    parts = encoder.parts(where)
    first = list(islice(parts, POOL_PARTS))
    number = _num_processes(len(first)) if processes is None else processes
    if number > 1 and encoder.in_processes:
        yield from _in_processes(chain(first, parts), where, encoder, number)
        return
    for part in chain(first, parts):
        yield from _encoded(part, where, encoder)


def _num_processes(num_parts: int) -> int:
    if num_parts < POOL_PARTS:
        return 1
    if sys.platform in ("win32", "darwin"):  # no fork: a program would have to be made for it
        return 1
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES)


def _in_processes(
    parts: Iterable[Part], where: str, encoder: RowEncoder, number: int
) -> Iterator[Block]:
    """Encode parts in processes, few of them ahead of what is read."""
    columns_of(encoder.kind).schema  # noqa: B018 - imports pyarrow, once for all processes
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(number, context, initializer=_begin, initargs=(where, encoder))
    waiting: deque[Future[list[Block]]] = deque()
    try:
        for part in parts:
            with warnings.catch_warnings():  # of forks beside threads: no child uses those
                warnings.simplefilter("ignore", DeprecationWarning)
                waiting.append(pool.submit(_part, part))
            if len(waiting) > 2 * number:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise RunError(
            f"cannot encode {where}",
            found="A process that encoded its rows was killed; memory may have run out.",
            fix="Start again; with fewer other programs, or cores (taskset), it needs less memory.",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_own: tuple[str, RowEncoder] | None = None
"""What a process that encodes works on."""


def _begin(where: str, encoder: RowEncoder) -> None:
    global _own
    gc.freeze()  # a collection would write to all pages that are shared with the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)  # as in the workers of a DataLoader: a fork has no other threads
    _own = where, encoder


def _part(part: Part) -> list[Block]:
    assert _own is not None
    return list(_encoded(part, *_own))


def _encoded(part: Part, where: str, encoder: RowEncoder) -> Iterator[Block]:
    records = part()
    for start in range(0, len(records), encoder.at_once):
        some = records[start : start + encoder.at_once]
        made = encoder.made(some, where)
        yield Block(
            batch=columns_of(encoder.kind).batch(where, made.rows),
            num_read=len(some),
            first=some[0].source,
            last=some[-1].source,
            names=tuple(dict.fromkeys(name for record in some for name in record.fields)),
            agreed=made.agreed,
            counts=made.counts,
            unused=made.unused,
        )
