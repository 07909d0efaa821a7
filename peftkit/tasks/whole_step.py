"""Losses over all rows of a step, such as in-batch negatives, with micro-batches (GradCache).

A pass over the whole step without gradients computes the values that rows share. Each micro-batch
then replaces the values of its rows by values with a gradient (arXiv:2101.06983).

Shapes: N rows of the step on all processes, K values of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import ClassVar

import torch
from torch import Tensor, nn

from peftkit.events import Listener, ignore
from peftkit.execution import rng
from peftkit.execution.world import Part, Rows, World
from peftkit.tasks.base import Task
from peftkit.tasks.batches import batches_that_fit, on_host, split_micro_batches
from peftkit.tasks.run_hooks import Run, RunHooks

INDEX = "step_index"
"""Entry of a batch: the index among the N of each of its rows."""


class WholeStep:
    """The rows of one step, and the values that their losses share.

    If the step has several micro-batches or processes, the constructor computes the values.
    Otherwise `batch` does when it gets a part of the rows, because memory ran out.

    Args:
        rows: This process's share of the step.

    Attributes:
        rows: The rows to train on; a row that the step has twice is two objects.
        values: (N, K), or None while one batch holds all rows.
    """

    def __init__(self, task: WholeStepTask, rows: Rows, run: Run) -> None:
        self._task, self._run = task, run
        self.rows = [*map(copy, rows)]  # unique ids: data.train may repeat rows (weight)
        self._places = {id(row): place for place, row in enumerate(self.rows)}
        self._states: dict[tuple[int, ...], rng.State] = {}
        self.values: Tensor | None = None
        is_trained = torch.is_grad_enabled()
        if not is_trained or run.world.world_size > 1 or len(run.micro_batches(rows)) > 1:
            self._compute_values()

    def batch(self, rows: Rows) -> dict[str, Tensor]:
        """Return a batch of rows, with their indices if the loss needs other rows."""
        has_padding = self._run.parallel.in_lockstep  # of other steps' rows, with any index
        is_in_step = all(id(row) in self._places for row in rows)
        if not (is_in_step or has_padding) or (self.values is None and len(rows) == len(self.rows)):
            return self._task.row_batch(rows)
        if self.values is None:
            self._compute_values()
        places = [self._places.get(id(row), 0) for row in rows]
        return {**self._task.row_batch(rows), INDEX: torch.tensor(places)}

    def restore_generators(self, batch: Mapping[str, Tensor]) -> None:
        """Restore the generators, to repeat the dropout of the pass over the whole step."""
        state = self._states.get(tuple(on_host(batch, INDEX).tolist()))
        if state is not None:
            rng.restore(state, self._run.world.device)

    def _compute_values(self) -> None:
        run, task, device = self._run, self._task, self._run.world.device
        start, states = rng.capture(device), dict[tuple[int, ...], rng.State]()

        def split(rows: Rows, size: int) -> list[Part]:
            tokens = run.state.plan.tokens
            return split_micro_batches(rows, task.num_positions, size, tokens, task.bucket_key)

        def compute(part: Part) -> tuple[rng.State, Tensor]:
            state = rng.capture(device)
            batch = {name: tensor.to(device) for name, tensor in task.row_batch(part).items()}
            with torch.no_grad(), run.world.autocast():
                return state, task.row_values(run.model, batch).float()

        values, order = list[Tensor](), list[int]()
        size = run.state.plan.rows
        for part, (state, computed), is_local in batches_that_fit(
            self.rows, size, split, compute, parallel=run.parallel
        ):
            if is_local:
                places = [self._places[id(row)] for row in part]
                states[tuple(places)] = state
                values.append(computed)
                order += places
        rng.restore(start, device)
        table = torch.zeros(0, device=device)
        if values:
            index = torch.tensor(order, device=device)
            table = torch.cat(values)
            table = torch.empty_like(table).index_copy_(0, index, table)
        self.values, first = _of_all(table, run.world)
        self._places = {row: first + place for row, place in self._places.items()}
        self._states = {tuple(first + n for n in key): state for key, state in states.items()}


def _of_all(values: Tensor, world: World) -> tuple[Tensor, int]:
    """Return the values of all processes in rank order, and the first index of this one's."""
    if world.world_size == 1:
        return values, 0
    shape = torch.tensor([*values.shape, 0][:2], device=world.device)
    shapes = world.gather(shape)  # (world_size, 2): a small last step may leave some without rows
    counts, width = shapes[:, 0].tolist(), int(shapes[:, 1].max())
    first = sum(counts[: world.rank])
    table = values.new_zeros(sum(counts), width, dtype=torch.float32)
    if len(values):
        table[first : first + len(values)] = values
    return world.sum(table), first


class WholeStepTask(RunHooks, Task):
    """A task whose row losses depend on values of all rows of the step."""

    collates_ahead: ClassVar[bool] = False
    _step: WholeStep | None = None

    @abstractmethod
    def row_batch(self, rows: Rows) -> dict[str, Tensor]:
        """Return rows as a batch, without their places in the step."""

    @abstractmethod
    def row_values(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the values (rows, K) on which the losses of other rows depend."""

    def before_step(self, rows: Rows, run: Run) -> Sequence[Rows]:
        """Compute the values of all rows of the step, without gradients."""
        self._step = WholeStep(self, rows, run)
        return [self._step.rows]

    def collate(self, rows: Rows) -> dict[str, Tensor]:
        """Return `row_batch`, with the indices of the rows if the loss needs other rows."""
        return self.row_batch(rows) if self._step is None else self._step.batch(rows)

    def metrics(
        self, model: nn.Module, rows: Rows, *, on_event: Listener = ignore
    ) -> dict[str, float]:
        self._step = None
        return super().metrics(model, rows, on_event=on_event)
