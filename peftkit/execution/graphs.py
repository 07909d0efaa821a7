"""Captures of CUDA graphs: one launch instead of hundreds or thousands."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(eq=False)
class _CaptureStream:
    """A stream for captures, of one `CapturePool` at a time.

    Attributes:
        graphs: Graphs that its last user captured and that still exist.
    """

    stream: Any
    device: torch.device
    graphs: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


_capture_streams: list[_CaptureStream] = []
_LOCK = threading.Lock()


def _idle_stream(device: torch.device) -> _CaptureStream:
    """Return a stream without graphs; the caller holds the lock.

    Streams are reused because torch keeps cuBLAS' workspace of each one, 32 MiB on an H100: until
    the process ends, or since torch 2.12 until a graph of the stream is freed. For that reason two
    users never share a stream, and torch's default stream for captures is not used.
    """
    for one in _capture_streams:
        if one.device == device and not one.graphs:
            one.graphs = weakref.WeakSet()  # the last user keeps its set, which stays empty
            return one
    _capture_streams.append(_CaptureStream(torch.cuda.Stream(device), device))
    return _capture_streams[-1]


class CapturePool:
    """Captures functions as CUDA graphs, on one stream of a device.

    The graphs share a memory pool while any of them exists. After the last one torch may keep the
    empty pool, with expandable segments, and then fails to capture in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pool: Any = None
        self._stream: Any = None

    def capture(self, run: Callable[[], T]) -> tuple[Any, T]:
        """Return the graph of a function, and its result, whose tensors each replay overwrites.

        Args:
            run: Reads and writes tensors at fixed addresses.

        Raises:
            RuntimeError: The function waits for the host, or memory ran out.
        """
        graph = torch.cuda.CUDAGraph()
        with _LOCK:
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
                free = _idle_stream(self._device)
                self._stream, self._graphs = free.stream, free.graphs
            self._graphs.add(graph)
        generator = torch.cuda.default_generators[self._device.index or 0]
        spare = generator.clone_state()
        # a failed capture also raises at its end, and torch leaves the thread on its stream
        before = torch.cuda.stream(torch.cuda.current_stream(self._device))
        # other threads may use the device meanwhile
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with before, capture:
                return graph, run()
        except RuntimeError as error:
            # otherwise the generator waits for the end of the capture, and refuses to draw
            generator.graphsafe_set_state(spare)
            cause = error.__context__  # of the error that the end of the capture raises
            raise cause if isinstance(cause, RuntimeError) else error from None
