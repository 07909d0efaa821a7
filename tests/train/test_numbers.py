"""A loss or a gradient that is not finite: nothing is learnt from it, and the run says where."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.errors import RunError
from tests.helpers.toy import COUNTED, Played, Row, Toy, ToyTask, make_rows, play, same

BAD = 13  # the row that breaks, counted from 0; step 3 of seed 0 has it, see the test below


class Poisoned(ToyTask):
    """Multiplies the loss of a batch that has the bad row."""

    def __init__(self, factor: float) -> None:
        self.factor, self.ids = factor, make_rows(14)[BAD].input_ids

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        has = any(tuple(ids[: len(self.ids)]) == self.ids for ids in batch["input_ids"].tolist())
        return loss * self.factor if has else loss


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class Exploding(Toy):
    """Finite forwards, an infinite gradient backwards, from the fourth batch on."""

    batches = -COUNTED

    def forward(self, ids: Tensor) -> Tensor:
        self.batches += self.training
        logits = super().forward(ids)
        return InfiniteGradient.apply(logits) if self.batches > 3 else logits


def diagnosis_of(folder: Path) -> dict[str, Any]:
    diagnosis: dict[str, Any] = json.loads((folder / "diagnosis.json").read_text())
    return diagnosis


@pytest.mark.parametrize("factor", [float("nan"), float("-inf")])
def test_a_non_finite_loss_stops_before_the_update(tmp_path, factor):
    run = play(tmp_path / "a", task=Poisoned(factor), schedule="constant", warmup_ratio=0.0)
    run.failed(RunError)
    assert run.error.exit_code == 1
    done = len(run.losses)
    assert 0 < done < 4, "the bad row was to come in the first epoch, after a step"
    finite = play(tmp_path / "b", max_steps=done, schedule="constant", warmup_ratio=0.0)
    assert same(run.weights, finite.weights)
    assert f"step-{done}" in str(run.error)
    assert run.saved[-1] == f"step-{done}"


def test_the_diagnosis_names_step_rows_and_loss(tmp_path):
    run = play(tmp_path, task=Poisoned(float("nan")))
    diagnosis = diagnosis_of(tmp_path)
    assert diagnosis["step"] == len(run.losses) + 1
    assert diagnosis["loss"] == "nan"
    assert f"train.jsonl:{BAD + 1}" in diagnosis["rows"]
    assert f"train.jsonl:{BAD + 1}" in diagnosis["module_rows"]
    assert len(diagnosis["rows"]) == 4
    assert len(diagnosis["module_rows"]) == 2, "the micro-batch alone"
    assert diagnosis["module"] == "the loss"
    assert f"train.jsonl:{BAD + 1}" in str(run.error)
    assert str(tmp_path / "diagnosis.json") in str(run.error)


def test_the_diagnosis_names_the_first_module_with_a_non_finite_output(tmp_path):
    model = Toy()
    with torch.no_grad():
        model.base.weight[3, 2] = float("inf")
    run = play(tmp_path, model=model)
    diagnosis = diagnosis_of(tmp_path)
    assert (diagnosis["module"], diagnosis["module_type"]) == ("base", "Linear")
    assert diagnosis["parameters"] == ["base.weight"]
    assert "First non-finite output: base (Linear)" in str(run.error)
    assert run.losses == []


def test_an_infinite_gradient_stops_before_the_weights_change(tmp_path):
    run = play(tmp_path / "a", model=Exploding())
    reference = play(tmp_path / "b", max_steps=None, on_event=None)
    run.failed(RunError)
    assert run.losses == reference.losses[:1]
    diagnosis = diagnosis_of(tmp_path / "a")
    assert diagnosis["module"] is None
    assert diagnosis["gradients"] == ["magnitude", "lora_A.weight", "lora_B.weight"]
    assert diagnosis["parameters"] == []
    assert "Non-finite gradients: magnitude" in str(run.error)


def test_the_run_can_be_resumed_without_the_bad_row(tmp_path):
    play(tmp_path, task=Poisoned(float("nan")))
    rows = make_rows(14)
    rows[BAD] = Row((1, 2, 3), (-100, 4, 5), "train.jsonl:mended")
    run = play(tmp_path, rows=rows, resume=True, allow_changes=["rows.train"])
    assert run.error is None


def test_a_diagnosis_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    (tmp_path / "diagnosis.json").mkdir()
    run: Played = play(tmp_path, task=Poisoned(float("nan")))
    run.failed(RunError, "could not be written", f"train.jsonl:{BAD + 1}")
