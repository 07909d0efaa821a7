"""One training run, and hooks for reference models, rollouts and values shared over a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from peftkit.data.rows.lazy import View
from peftkit.events import Event, Listener, ignore
from peftkit.execution.signals import StopRequest
from peftkit.execution.state import State
from peftkit.execution.world import Parallel, Part, Rows, World
from peftkit.settings import TrainConfig
from peftkit.tasks.base import Task
from peftkit.tasks.batches import split_micro_batches

if TYPE_CHECKING:
    from peftkit.model.modes import SideAdapter

MOST_PADDING = 1.25
"""Tokens of a joined micro-batch relative to two, which also cost a pass over all weights."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference state of the model.

    Attributes:
        state: Returns a context in which the model is in this state.
        key: Identifies base, precision and values; "": unknown, results are not cached.
    """

    state: Callable[[], AbstractContextManager[None]]
    key: str = ""


class RunHooks:
    """A mixin of `Task` with hooks that the training loop calls; by default they do nothing."""

    why_nothing: ClassVar[str] = "no step had a target token."
    """Reason in the error of a run that trained on nothing."""
    rows_added: int = 0
    """Rows that `before_step` adds to each step of a process."""

    @property
    def identity(self) -> Mapping[str, object]:
        """Values that must not change when a run resumes, in addition to the task's config."""
        return {}

    def set_reference(self, reference: Reference) -> None:
        """Set the model before training as the reference of the loss."""
        return None

    @property
    def other_adapters(self) -> Sequence[str]:
        """Folders of further adapters over the same base that the task runs."""
        return ()

    def add_adapter(self, folder: str, adapter: SideAdapter) -> None:
        """Add one of `other_adapters`, loaded for the run's base.

        Raises:
            AdapterError: The adapter was trained for another task.
        """
        return None

    def setup(self, run: Run) -> None:
        """Prepare a run, before its first step or after a resume."""
        return None

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors of the task that a checkpoint needs; the same on all processes."""
        return {}

    def load_state(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Restore the `state` of a checkpoint, before `setup`.

        Raises:
            CheckpointError: It does not fit the model.
        """
        return None

    def before_step(self, rows: Rows, run: Run) -> Sequence[Rows]:
        """Return the rows of each optimizer step for this process's share of a step's rows.

        The default is one step with the same rows. A task may compute values that the losses of
        rows share, or sample completions. If there is nothing to train on, all processes return no
        steps. Metrics go into `run.figures`. An evaluation calls this with all eval rows.
        """
        return [rows]

    def rows_ahead(self, rows: Rows, run: Run) -> Rows | None:
        """Return what `before_step` will make of the next step's rows; None: not yet known."""
        return None

    def after_step(self) -> None:
        """Update values that follow the weights, after each optimizer step."""
        return None

    def stop_reason(self, figures: Mapping[str, float]) -> str:
        """Return the reason to end the run after a step with these metrics; "": continue."""
        return ""

    def evaluate(self, rows: Rows, run: Run) -> dict[str, float] | None:
        """Return the metrics of an evaluation, "loss" among them; None: the mean of `loss`.

        Args:
            rows: This process's share of the eval rows; the metrics are means over all rows.
        """
        return None

    def completion_metrics(
        self, model: nn.Module, rows: Rows, *, run_code: bool = False, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return the metrics of greedy completions, for `peftkit eval`.

        Args:
            run_code: Whether to call the Python functions in the task's config.
        """
        return {}


NO_HOOKS = RunHooks()


def hooks_of(task: object) -> RunHooks:
    """Return the hooks of a task; a task without hooks gets `NO_HOOKS`."""
    return task if isinstance(task, RunHooks) else NO_HOOKS


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run on one of its processes.

    Attributes:
        rows, eval_rows: Encoded rows, the same on every process.
        state: The run's state between two steps; `state.plan` is the current execution plan.
        parallel: How processes share rows and forward passes.
        stop: Whether a stop was requested.
        listeners: Receive the events of the run; empty except on the main process.
        agreed_stop: The signal on which several processes stop, or 0.
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
    agreed_stop: int = 0
    indices: Sequence[int] = ()
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def hooks(self) -> RunHooks:
        """The task's hooks."""
        return hooks_of(self.task)

    @property
    def all_rows(self) -> Rows:
        """Training rows, then eval rows."""
        return View([self.rows, self.eval_rows])

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.num_steps(len(self.rows), self.world.world_size)

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or the run has stopped early."""
        state, early_stopping = self.state, self.config.early_stopping
        enough = early_stopping is not None and state.worse_evals >= early_stopping.patience
        return enough or state.is_ended or state.step >= self.num_steps

    def is_due(self, every: int | None) -> bool:
        """Return whether something is due that happens every so many steps, and at the end."""
        return self.is_over or (every is not None and self.state.step % every == 0)

    @property
    def stopping(self) -> int:
        """The signal to stop on, or 0; several processes stop once they agree."""
        return self.stop.signum if self.world.world_size == 1 else self.agreed_stop

    def agree_to_stop(self) -> int:
        """Return the signal that one of the processes received, or 0; all processes call it."""
        self.agreed_stop = self.world.max(self.stop.signum)
        return self.agreed_stop

    def say(self, event: Event) -> None:
        """Send an event to all listeners."""
        for listener in self.listeners:
            listener(event)

    def micro_batches(self, rows: Rows) -> list[Part]:
        """Return rows in micro-batches.

        Rows that the task adds to a step join its only micro-batch, unless they need much padding.
        """
        plan, task, size = self.state.plan, self.task, self.state.plan.rows
        added = self.hooks.rows_added
        if 0 < added < len(rows) and size == self.config.rows_per_step():
            apart = task.num_positions(rows[:-added]) + task.num_positions(rows[-added:])
            if task.num_positions(rows) <= MOST_PADDING * apart:
                size += added
        return split_micro_batches(rows, task.num_positions, size, plan.tokens, task.bucket_key)
