"""Trained tensors without a gradient are reported once, and honest runs report none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.optim import GradientWatch
from tests.helpers import cell, grid, laws
from tests.helpers.padding_free import row_of
from tests.helpers.toy import Toy, play


class Detached(Toy):
    """Its low-rank update reaches the output without a graph."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids))
        return (self.base(x) + self.lora_B(self.lora_A(x)).detach()) * self.magnitude


def test_a_tensor_without_gradient_is_reported_once(tmp_path):
    run = play(tmp_path, model=Detached())
    (notice,) = run.notices
    assert notice.startswith(
        "Step 9: The gradients of 2 of 3 trained tensors were zero in 8 steps in a row, so these "
        "tensors do not train: lora_A.weight, lora_B.weight. "
    )


def test_a_gradient_in_between_starts_the_count_again():
    watch, zero = GradientWatch(["a", "b"], torch.device("cpu")), torch.tensor([1.0, 0.0])

    def longest_after(*steps: Tensor) -> float:
        for norms in steps:
            watch.count(norms)
        watch.num_steps = float(watch.longest)
        return watch.num_steps

    assert longest_after(*[zero] * 7, torch.ones(2), *[zero] * 7) == 7
    assert watch.report() == ""
    assert longest_after(zero) == 8
    assert "do not train: b. " in watch.report()
    assert watch.report() == ""


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize("column", grid.COLUMNS)
def test_methods_train_all_their_tensors_from_the_second_step_on(
    column, tmp_path: Path, monkeypatch, tokenizer
):
    """A of LoRA, and whatever else a method multiplies by zeros, has no gradient in step 1 only."""
    monkeypatch.setattr(GradientWatch, "ZERO_STEPS", 2)
    quantize = "nf4" if column == "loftq" else "none"
    model = cell.bare_model("gpt2", quantize)
    laws.start(grid.fitted(grid.COLUMNS[column], model), model, "gpt2")
    task = CausalLM(model, tokenizer, DataConfig(train="", max_length=64))
    rows = [row_of(n) for n in (9, 14, 5, 11)]
    settings = {"max_steps": 4, "save_every": None, "eval_every": None}
    run = play(tmp_path, model=model, task=task, rows=rows, eval_rows=[], **settings)
    assert run.error is None
    assert run.notices == []
