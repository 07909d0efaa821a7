"""What a task tells beside its loss, and what rows of a step know of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peftkit.tasks.training import Run
from torch import Tensor, nn

from peftkit.events import EvalDone, StepDone
from tests.train.toy import Row, Toy, ToyTask, learner_of, make_rows, play

ROWS = make_rows(8)


class Centred(ToyTask):
    """Each row's loss is its distance from the mean over the step; tells how often it is above."""

    predicts_tokens = False
    metric_names = ("above",)
    needs_whole_step = True

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return len(batch["labels"])

    def row_values(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        scores = model(batch["input_ids"]).float().tanh()
        return (scores * (batch["labels"] != -100)[..., None]).sum((1, 2))[:, None]

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self.loss_and_metric_sums(model, batch)[0]

    def loss_and_metric_sums(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        own = self.row_values(model, batch)
        mean = batch.get("step_values", own.detach()).mean()
        if "step_values" in batch:  # what was seen first is what is seen now, dropout and all
            torch.testing.assert_close(batch["step_values"][batch["step_index"]], own.detach())
        return torch.stack([((own - mean) ** 2).sum(), (own > mean).sum().float()])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rows_know_the_whole_step_whatever_goes_through_at_once(dropout: float) -> None:
    task, found = Centred(), []
    for size in (8, 3, 1) if dropout == 0 else (3,):
        model = Toy(dropout).train()
        learner = learner_of(model, task)
        learner.use(replace(learner.plan, rows=size))
        facts = learner.step(ROWS, 1e-2)
        found.append((facts.loss, facts.figures["above"], model.lora_B.weight.detach().clone()))
    for loss, above, weight in found[1:]:
        assert (loss, above) == pytest.approx(found[0][:2], rel=1e-5)
        torch.testing.assert_close(weight, found[0][2])


def test_rows_keep_their_values_where_they_are_sorted_to_fit() -> None:
    learner = learner_of(Toy().train(), Centred(), tokens_per_batch=None)
    learner.use(replace(learner.plan, tokens=16))  # the longest first
    assert len(learner.micro_batches(ROWS)) > 2
    learner.step(ROWS, 1e-2)  # Centred compares the values that each batch is given


def test_figures_are_told_at_each_step_and_evaluation(tmp_path: Path) -> None:
    run = play(tmp_path, task=Centred(), rows=ROWS, eval_rows=ROWS[:4], eval_every=2)
    steps = [event for event in run.events if isinstance(event, StepDone)]
    evals = [event for event in run.events if isinstance(event, EvalDone)]
    assert all(0 <= step.figures["above"] <= 1 for step in steps)
    assert steps
    assert all(0 <= done.metrics["above"] <= 1 for done in evals)
    assert evals
    assert '"figures": {"above": ' in (tmp_path / "metrics.jsonl").read_text()


def test_a_task_begins_once_with_all_rows(tmp_path: Path) -> None:
    with_bos: list[Run] = []

    class Beginner(ToyTask):
        def setup(self, model: nn.Module, context: Run) -> None:
            torch.rand(3)  # draws: the run is the same
            with_bos.append(context)

    rows: list[Row] = ROWS[:6]
    run = play(tmp_path / "a", task=Beginner(), rows=rows, eval_rows=ROWS[6:], eval_every=None)
    (context,) = with_bos
    assert list(context.rows) == ROWS
    assert context.folder == tmp_path / "a"
    plain = play(tmp_path / "b", task=ToyTask(), rows=rows, eval_rows=ROWS[6:], eval_every=None)
    assert run.losses == plain.losses
