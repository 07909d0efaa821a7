"""What a task tells beside its loss, and what rows of a step know of each other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from peftkit.events import EvalDone, StepDone
from peftkit.tasks.run_hooks import Run, RunHooks
from peftkit.tasks.whole_step import INDEX, WholeStepTask
from tests.helpers.toy import Row, Toy, ToyTask, make_rows, play, step_of

ROWS = make_rows(8)


class Centred(WholeStepTask, ToyTask):
    """Each row's loss is its distance from the mean over the step; tells how often it is above."""

    predicts_tokens = False
    metric_names = ("above",)

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return len(batch["labels"])

    def row_values(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        scores = model(batch["input_ids"]).float().tanh()
        return (scores * (batch["labels"] != -100)[..., None]).sum((1, 2))[:, None]

    def row_batch(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        return dict(ToyTask.collate(self, rows))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if INDEX not in batch:
            values = self.row_values(model, batch)
            mean = values.detach().mean()
        else:
            self._step.restore_generators(batch)
            values = self.row_values(model, batch)
            # what was computed first is what is computed now, dropout and all
            torch.testing.assert_close(self._step.values[batch[INDEX]], values.detach())
            mean = self._step.values.mean()
        return torch.stack([((values - mean) ** 2).sum(), (values > mean).sum().float()])


@pytest.mark.parametrize("rows_of_step", [ROWS, ROWS[:4] * 2], ids=["", "repeated rows"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rows_know_the_whole_step_whatever_goes_through_at_once(dropout, rows_of_step):
    task, steps = Centred(), []
    for size in (8, 3, 1) if dropout == 0 else (3,):
        model = Toy(dropout).train()
        step = step_of(model, task)
        step.use(replace(step.plan, rows=size))
        (rows,) = task.before_step(rows_of_step, step.run)
        facts = step(rows, 1e-2)
        steps.append((facts.loss, facts.figures["above"], model.lora_B.weight.detach().clone()))
    for loss, above, weight in steps[1:]:
        assert (loss, above) == pytest.approx(steps[0][:2], rel=1e-5)
        torch.testing.assert_close(weight, steps[0][2])


def test_rows_keep_their_values_where_they_are_sorted_to_fit():
    task = Centred()
    step = step_of(Toy().train(), task, tokens_per_batch=None)
    step.use(replace(step.plan, tokens=16))  # the longest first
    assert len(step.run.micro_batches(ROWS)) > 2
    (rows,) = task.before_step(ROWS, step.run)
    step(rows, 1e-2)  # Centred compares the values that each batch is given


def test_figures_are_told_at_each_step_and_evaluation(tmp_path):
    run = play(tmp_path, task=Centred(), rows=ROWS, eval_rows=ROWS[:4], eval_every=2)
    steps = [event for event in run.events if isinstance(event, StepDone)]
    evals = [event for event in run.events if isinstance(event, EvalDone)]
    assert all(0 <= step.figures["above"] <= 1 for step in steps)
    assert steps
    assert all(0 <= done.metrics["above"] <= 1 for done in evals)
    assert evals
    assert '"figures": {"above": ' in (tmp_path / "metrics.jsonl").read_text()


def test_a_task_begins_once_with_all_rows(tmp_path):
    begun: list[Run] = []

    class Beginner(RunHooks, ToyTask):
        def setup(self, run: Run) -> None:
            torch.rand(3)  # draws: the run is the same
            begun.append(run)

    rows: list[Row] = ROWS[:6]
    run = play(tmp_path / "a", task=Beginner(), rows=rows, eval_rows=ROWS[6:], eval_every=None)
    (first,) = begun
    assert list(first.all_rows) == ROWS
    assert first.config.output_dir == tmp_path / "a"
    plain = play(tmp_path / "b", task=ToyTask(), rows=rows, eval_rows=ROWS[6:], eval_every=None)
    assert run.losses == plain.losses
