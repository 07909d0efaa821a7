"""A step of decoding that a GPU records once: one launch instead of one for each of its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)

EAGER_STEPS = 4
"""Calls before a step is recorded; shapes that come more seldom are not worth it."""


class Recorder:
    """Records the steps of one engine with CUDA graphs, which share one pool of memory.

    Attributes:
        num_recorded: So many were recorded.
        is_able: Until a step waits for the host, or else cannot be recorded; then none is.
    """

    def __init__(self) -> None:
        self.num_recorded, self.is_able = 0, True
        self._pool: Any = None

    def step(self, run: Callable[[], Tensor]) -> RecordedStep:
        """Return a function that is recorded once it was called some times."""
        return RecordedStep(self, run)

    def record(self, run: Callable[[], Tensor]) -> tuple[Any, Tensor] | None:
        """Return a graph and the tensor that it writes; None if it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = run()
        except RuntimeError as problem:
            self.is_able = False
            _LOG.warning("Steps of decoding are not recorded: %s", str(problem).splitlines()[0])
            return None
        self.num_recorded += 1
        return graph, out


class RecordedStep:
    """A function that reads and writes tensors which stay where they are."""

    def __init__(self, recorder: Recorder, run: Callable[[], Tensor]) -> None:
        self._recorder, self._run = recorder, run
        self._num_calls = 0
        self._recorded: tuple[Any, Tensor] | None = None

    def __call__(self) -> Tensor:
        """Run it, or what was recorded of it; the result is overwritten by the next call."""
        self._num_calls += 1
        if self._num_calls > EAGER_STEPS and self._recorded is None and self._recorder.is_able:
            self._recorded = self._recorder.record(self._run)
        if self._recorded is None:
            return self._run()
        graph, out = self._recorded
        graph.replay()
        return out
