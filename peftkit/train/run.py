"""The state of one training run on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from peftkit.data.rows.lazy import View
from peftkit.events import Event, Listener
from peftkit.execution.parallel import Parallel, Part
from peftkit.execution.signals import StopRequest
from peftkit.execution.state import State
from peftkit.execution.world import World
from peftkit.settings import TrainConfig
from peftkit.tasks.base import Task
from peftkit.tasks.batches import split_micro_batches
from peftkit.tasks.run_hooks import RunHooks, hooks_of


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run on one of its processes.

    Attributes:
        rows, eval_rows: Encoded rows, the same on every process.
        state: The run's state between two steps; `state.plan` is the current execution plan.
        parallel: How processes share rows and forward passes.
        stop: Whether a stop was requested.
        listeners: Receive the events of the run; empty except on the main process.
        indices: Indices into `rows` of this process in the current step.
        figures: Metrics of the current step that a task adds to its loss, by name.
    """

    model: nn.Module
    task: Task
    rows: Sequence[Any]
    eval_rows: Sequence[Any]
    config: TrainConfig
    world: World
    parallel: Parallel
    state: State
    stop: StopRequest
    listeners: list[Listener] = field(default_factory=list)
    indices: Sequence[int] = ()
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def hooks(self) -> RunHooks:
        """The task's hooks."""
        return hooks_of(self.task)

    @property
    def all_rows(self) -> Sequence[Any]:
        """Training rows, then eval rows."""
        return View([self.rows, self.eval_rows])

    def say(self, event: Event) -> None:
        """Send an event to all listeners."""
        for listener in self.listeners:
            listener(event)

    def micro_batches(self, rows: Sequence[Any]) -> list[Part]:
        """Return rows in micro-batches."""
        plan, task = self.state.plan, self.task
        return split_micro_batches(
            rows, task.num_positions, plan.rows, plan.tokens, task.bucket_key
        )
