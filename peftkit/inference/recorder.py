"""Decoding steps, and their capture as CUDA graphs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from peftkit.events import Fallback
from peftkit.execution.graphs import CapturePool
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.forward.recorded import why_not_captured
from peftkit.inference.cache import SMALLEST, Arena, power_of_two
from peftkit.inference.cached_attention import Block, Decode
from peftkit.inference.engine import Completion, masked, table_of

EAGER_STEPS = 4
"""Eager calls of a shape before it is captured as a CUDA graph."""
_LOG = logging.getLogger(__name__)
_unrecordable: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models whose steps cannot be captured; later engines do not try again."""


def static_block(arena: Arena) -> Block:
    """Return the slots and lengths of a step that later rows can use too."""
    longest = power_of_two(1 + max(row.length for row in arena.rows))
    num_slots = min(power_of_two(len(arena.rows)), arena.num_slots)
    return Block(arena, num_slots, min(max(longest, SMALLEST), arena.capacity))


class Step(NamedTuple):
    """A forward pass over some slots, with any rows; `run` returns the logits."""

    blocks: list[Block]
    decode: Decode
    run: Callable[[], Tensor]


class Batch:
    """A fixed set of growing rows."""

    def __init__(self, step: Step) -> None:
        self.decode, self._run = step.decode, step.run
        self._owners: list[Completion | None] = [
            None if row is None else row.owner for row in step.decode.rows
        ]
        self._table = table_of(self._owners, step.decode.device)

    def step(self) -> None:
        """Choose the next tokens, and append them to the completions and the model's input."""
        chosen = self._table.choose(masked(self._run(), self._owners))
        self.decode.advance(chosen[:, :1])
        choices = self._table.choices(chosen.tolist())  # the only synchronisation
        for owner, choice in zip(self._owners, choices, strict=True):
            if owner is not None:
                owner.take(choice)


def why_not_recorded(model: Any) -> str:
    """Return why a model's decoding steps on a GPU are not captured as CUDA graphs, or ""."""
    if model in _unrecordable:
        return "Capturing a step has failed."
    return why_not_captured(model)


def unrecorded(cause: str) -> Fallback:
    """Return the fallback of a model whose decoding steps are not captured."""
    return Fallback(
        path="Decoding runs without CUDA graphs",
        cause=f"{cause.rstrip('.')}.",
        cost="Each token launches hundreds of kernels; small batches are several times slower.",
        fix="Keep the whole base on one GPU; for mixtures of experts, load it in bf16.",
    )


class Recorder:
    """Captures the decoding steps of one engine as CUDA graphs.

    Args:
        model: The engine's model. If a capture fails, except for lack of memory, later engines of
            the model do not try again.

    Attributes:
        num_recorded: Number of graphs.
        is_able: False after a failed capture, for example of a step that waits for the host.
    """

    def __init__(self, model: Any) -> None:
        self.num_recorded, self.is_able = 0, True
        self._model, self._captures = model, CapturePool(model.device)

    def step(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that is captured after its first `EAGER_STEPS` calls.

        Args:
            run: Reads and writes tensors at fixed addresses; each call overwrites its result.
        """
        num_calls, recorded = 0, None

        def call() -> Tensor:
            nonlocal num_calls, recorded
            num_calls += 1
            if num_calls > EAGER_STEPS and recorded is None and self.is_able:
                recorded = self._record(run)
            if recorded is None:
                return run()
            graph, out = recorded
            graph.replay()
            return out

        return call

    def _record(self, run: Callable[[], Tensor]) -> tuple[Any, Tensor] | None:
        """Return a graph and its output tensor; None if the capture fails."""
        try:
            recorded = self._captures.capture(run)
        except RuntimeError as problem:
            self.is_able = False
            if not is_out_of_memory(problem):
                _unrecordable.add(self._model)
            _LOG.warning("%s", unrecorded(str(problem).splitlines()[0]).text)
            return None
        self.num_recorded += 1
        return recorded
