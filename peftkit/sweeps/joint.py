"""One optimizer step of several runs: their micro-batches go through the model together.

Each run's rows, loss, gradients and optimizer are its own: a row sees only its run's adapter, and
the loss of a run is divided by its own targets. Frozen products are made once for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from peftkit.execution import rng
from peftkit.execution.out_of_memory import is_out_of_memory, release_memory
from peftkit.execution.state import StepFacts
from peftkit.sweeps.layers import Mounted, Part
from peftkit.tasks.token_task import TokenTask
from peftkit.train.diagnosis import NonFiniteError
from peftkit.train.run import Run

Rows = tuple[str, Sequence[Any]]
"""A run, and rows of its that go through the model at once."""
Asked = Mapping[str, tuple[list[Any], float]]
"""Run to its rows of a step and its learning rate."""


CPU_TOKENS = 512
"""Of a joint pass on a CPU, where a recipe leaves it open: more take memory, and no less time."""


class JointLearner:
    """Computes the gradients of several runs in joint passes.

    Args:
        runs: On one model. task: Of one of them, which makes the batches of all.

    Attributes:
        most: Tokens of a pass with several runs; lower once memory ran out.
    """

    def __init__(self, runs: Mapping[str, Run], task: TokenTask, mounted: Mounted) -> None:
        self.runs, self.task = runs, task
        self.mounted, self.routing = mounted, mounted.routing
        first = next(iter(runs.values()))
        self.model, self.ranks = first.model, first.ranks
        plan = first.learner.asked
        self.most = plan.tokens
        if not plan.on_gpu and first.config.tokens_per_batch == "auto":
            self.most = CPU_TOKENS
        with self.ranks.autocast():
            mounted.lay_out()

    def step(self, asked: Asked) -> dict[str, StepFacts | NonFiniteError]:
        """Let each run learn from its rows; a run whose numbers are not finite is told as such."""
        done: dict[str, StepFacts | NonFiniteError] = {}
        for team in self._teams(asked):
            done |= self._step(team)
        return done

    def _step(self, asked: Asked) -> dict[str, StepFacts | NonFiniteError]:
        while True:
            self.mounted.refresh(asked)  # and lets go of the graph of an attempt that failed
            try:
                sums, totals = self._gradients(asked)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            release_memory()
            if not self._use_less_memory(asked):
                return {name: self._alone(name, *own) for name, own in asked.items()}
        return {
            name: self._finished(name, sums[name], totals[name], rows, rate)
            for name, (rows, rate) in asked.items()
        }

    def _gradients(self, asked: Asked) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the summed loss and the number of targets of each run; gradients are in place."""
        device = self.ranks.device
        passes = list(self._passes(asked))
        joined = [self.task.joined([rows for _, rows in parts]) for parts in passes]
        targets = dict.fromkeys(asked, 0)
        for parts, (_, counts, _) in zip(passes, joined, strict=True):
            for (name, _), count in zip(parts, counts, strict=True):
                targets[name] += count
        sums = {name: torch.zeros(1, device=device) for name in asked}
        for name in asked:
            self.runs[name].learner.optimizer.zero_grad(set_to_none=True)
        for parts, (batch, counts, tokens) in zip(passes, joined, strict=True):
            pieces = [
                Part(name, len(rows), size)
                for (name, rows), size in zip(parts, tokens, strict=True)
            ]
            moved = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
            with self.routing.to(*pieces), self.ranks.autocast():
                losses = self.task.loss_sums(self.model, moved, counts)
                scaled = [
                    loss * (self.runs[name].learner.scale.factor / max(targets[name], 1))
                    for (name, _), loss in zip(parts, losses, strict=True)
                ]
                torch.stack(scaled).sum().backward()
            for (name, _), loss in zip(parts, losses, strict=True):
                sums[name] += loss.detach()
        totals = {
            name: torch.full((), float(count), device=device) for name, count in targets.items()
        }
        return sums, totals

    def _teams(self, asked: Asked) -> Iterator[Asked]:
        """Yield runs that go through the model together; their gradients are gone then."""
        team: dict[str, tuple[list[Any], float]] = {}
        first: list[Any] = []
        for name, own in asked.items():
            part = self.runs[name].learner.micro_batches(own[0])[0]
            if team and self.most and self.task.num_positions([*first, *part]) > self.most:
                yield team
                team, first = {}, []
            team[name] = own
            first += part
        yield team

    def _passes(self, asked: Asked) -> Iterator[list[Rows]]:
        """Yield what goes through the model at once: micro-batches of as many runs as fit."""
        of_runs = [
            [(name, part) for part in self.runs[name].learner.micro_batches(rows)]
            for name, (rows, _) in asked.items()
        ]
        for turn in zip_longest(*of_runs):  # of a run one micro-batch at a time
            parts: list[Rows] = []
            for part in filter(None, turn):
                rows = [row for _, some in (*parts, part) for row in some]
                if parts and self.most and self.task.num_positions(rows) > self.most:
                    yield sorted(parts, key=_longest, reverse=True)
                    parts = []
                parts.append(part)
            yield sorted(parts, key=_longest, reverse=True)

    def _use_less_memory(self, asked: Asked) -> bool:
        """Lower `most`; False where every pass is of one run already."""
        joint = [parts for parts in self._passes(asked) if len(parts) > 1]
        if not joint:
            return False
        rows = [[row for _, some in parts for row in some] for parts in joint]
        self.most = max(map(self.task.num_positions, rows)) // 2
        return True

    def _finished(
        self, name: str, sums: Tensor, total: Tensor, rows: list[Any], rate: float
    ) -> StepFacts | NonFiniteError:
        with self.routing.alone(name):
            try:
                facts = self.runs[name].learner.finish(sums, total, rows, rate)
            except NonFiniteError as error:
                return error
            return self._alone(name, rows, rate) if facts is None else facts

    def _alone(self, name: str, rows: list[Any], rate: float) -> StepFacts | NonFiniteError:
        """Let one run take its step by itself, as it would outside of a sweep."""
        before = rng.capture(self.ranks.device)
        with self.routing.alone(name):
            try:
                return self.runs[name].learner.step(rows, rate)
            except NonFiniteError as error:
                rng.restore(before, self.ranks.device)
                return error


def _longest(part: Rows) -> int:
    """Return the length of a part's longest document: `unpadded` wants the longest of all first."""
    return max(n for row in part[1] for n in getattr(row, "lengths", (len(row.input_ids),)))
