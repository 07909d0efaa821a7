"""Decoding steps, and their capture as CUDA graphs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from peftkit.events import Fallback
from peftkit.execution.graphs import CapturePool
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.recorded import why_not_captured
from peftkit.inference.cache import SMALLEST, Arena, power_of_two
from peftkit.inference.cached_attention import Block, Decode, readers_of
from peftkit.inference.engine import Completion, masked, table_of

EAGER_STEPS = 1
"""Eager calls of a shape before its capture as a CUDA graph, which costs about as much as one."""
MAX_RECORDED = 32
"""Maximum CUDA graphs of decoding steps; the oldest is dropped."""
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

    decode: Decode
    run: Callable[[], Tensor]


class Batch:
    """The rows of some arenas, until these change."""

    def __init__(self, step: Step, arenas: Sequence[Arena]) -> None:
        self.decode, self._run = step
        self._changes = {arena: arena.num_changes for arena in arenas}
        self._owners: list[Completion | None] = [
            None if row is None else row.owner for row in step.decode.rows
        ]
        self._table = table_of(self._owners, step.decode.device)

    def is_of(self, arenas: Sequence[Arena]) -> bool:
        """Return whether these are its rows, and whether their slots have room for a token."""
        changes = {arena: arena.num_changes for arena in arenas}
        return changes == self._changes and self.decode.has_room

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


class Graphs:
    """The decoding steps of one engine, captured as CUDA graphs.

    A step reads tensors at fixed addresses: those of arenas, prefixes and adapters. `forget` drops
    steps before these change.

    Attributes:
        records: Whether steps are static, for captures; otherwise each batch has a new step.
        num_recorded: Number of captured steps.
        is_able: Whether all captures have succeeded.
    """

    def __init__(self, model: Any) -> None:
        plan = ExecutionPlan.for_model(model)
        self.records = plan.records_decoding and not why_not_recorded(model)
        self.num_recorded, self.is_able = 0, True
        self._model, self._captures = model, CapturePool(model.device)
        self._batch: Batch | None = None
        self._steps: dict[Any, Step] = {}

    def batch(
        self, arenas: Sequence[Arena], forward: Callable[[Decode], Callable[[], Tensor]]
    ) -> Batch:
        """Return the batch of the rows of some arenas; the same one until they change.

        Args:
            forward: Returns a function that runs the model and returns the logits.
        """
        if self._batch is None or not self._batch.is_of(arenas):
            self._batch = Batch(self._step(arenas, forward), arenas)
        return self._batch

    def forget(self, reads: Callable[[Decode], bool] = lambda decode: True) -> None:
        """Drop all steps, or those that read something that changes."""
        if self._batch is not None and reads(self._batch.decode):
            self._batch = None
        self._steps = {key: step for key, step in self._steps.items() if not reads(step.decode)}

    def _step(
        self, arenas: Sequence[Arena], forward: Callable[[Decode], Callable[[], Tensor]]
    ) -> Step:
        if not self.records:
            decode = Decode([Block(a, len(a.rows)) for a in arenas], self._model.device)
            return Step(decode, forward(decode))
        rows = [row for arena in arenas for row in arena.rows]
        blocks = tuple(static_block(arena) for arena in arenas)
        # mixed adapters are stacked once for each order of rows
        names = [row.owner.request.adapter for row in rows]
        readers = readers_of(rows, is_padded=True)
        prefixes = frozenset((span, len(at)) for span, at in readers.items())
        key = blocks, tuple(names if len(set(names)) > 1 else names[:1]), prefixes
        if key in self._steps:
            self._steps[key].decode.fill()
        else:
            if len(self._steps) >= MAX_RECORDED:
                del self._steps[next(iter(self._steps))]
            decode = Decode(blocks, self._model.device)
            self._steps[key] = Step(decode, self._recorded(forward(decode)))
        return self._steps[key]

    def _recorded(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
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
