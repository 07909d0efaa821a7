"""What a run does and says, from its first step to its result."""

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from peftkit.errors import ConfigError, DataError, OutputError
from peftkit.events import EvalDone, Event, Progress, RunDone, RunStarted, Saved, Stage, StepDone
from peftkit.report.history import read_history
from peftkit.settings import EarlyStopping, TrainConfig
from peftkit.train.loop import fit
from tests.helpers.toy import Crash, Played, Row, Toy, ToyTask, config_of, make_rows, play, same


def test_only_what_requires_a_gradient_is_trained(tmp_path):
    before = Played(Toy(), []).weights
    after = play(tmp_path).weights
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"lora_A.weight", "lora_B.weight", "magnitude"}


def test_the_loss_falls_on_what_is_learnt(tmp_path):
    losses = play(tmp_path, epochs=60.0, save_every=None, eval_every=None, learning_rate=0.1).losses
    assert losses[-1] < 0.5 * losses[0]


MASKED = [Row((1, 2), (-100, -100), f"train.jsonl:{n}") for n in range(4)]


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"model": Toy().requires_grad_(False)}, ConfigError, "nothing to train in Toy"),
        ({"model": Toy(dtype=torch.float16)}, ConfigError, "fp16"),
        ({"rows": []}, DataError, "no rows"),
        ({"rows": MASKED}, DataError, "train.jsonl:3"),
        ({"eval_rows": MASKED[:1]}, DataError, "masked"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_cause(changes, kind, text, tmp_path):
    run = play(tmp_path, **changes)
    run.failed(kind, text)
    assert bool(run.losses) == ("eval_rows" in changes)


def test_a_run_says_what_it_does_in_order(tmp_path):
    run = play(tmp_path, save_every=None, eval_every=None, max_steps=3)
    kinds = [type(event) for event in run.events if not isinstance(event, Progress)]
    assert kinds == [Stage, RunStarted, StepDone, StepDone, StepDone, EvalDone, Saved, RunDone]
    assert run.notices == []


def test_the_result_says_what_came_out(tmp_path):
    run = play(tmp_path)
    result = run.result
    evals = [event for event in run.events if isinstance(event, EvalDone)]
    best = min(evals, key=lambda event: event.metrics["loss"])
    assert result.step == 12
    assert result.checkpoint == tmp_path / "checkpoints" / "step-12"
    assert result.best_step == best.step
    assert result.metrics["loss"] == pytest.approx(sum(run.losses[-10:]) / 10)
    assert result.metrics["epochs"] == pytest.approx(12 / 4)
    assert result.metrics["eval_loss"] == evals[-1].metrics["loss"]
    assert result.metrics["best_eval_loss"] == best.metrics["loss"]
    assert result.metrics["num_tokens"] == 3 * sum(len(row.input_ids) for row in make_rows(14))
    assert result.metrics["peak_bytes"] > 1_000_000


def test_the_eval_loss_is_the_mean_over_all_targets(tmp_path):
    rows, task = make_rows(5, first=50), ToyTask()
    run = play(tmp_path, eval_rows=rows)
    batch = task.collate(rows)
    with torch.no_grad():
        loss = float(task.loss(run.model.eval(), batch)[0]) / task.num_targets(batch)
    evals = [event for event in run.events if isinstance(event, EvalDone)]
    assert [event.step for event in evals] == [3, 6, 9, 12]
    # two batches of 2 and one of 1 against one of 5: sums in another order
    assert evals[-1].metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert evals[-1].metrics["perplexity"] == pytest.approx(np.exp(loss), rel=1e-6)


@pytest.mark.parametrize("tokens", [True, False])
def test_only_a_loss_of_tokens_has_a_perplexity(tokens, tmp_path):
    task = ToyTask()
    task.predicts_tokens = tokens
    run = play(tmp_path, task=task, max_steps=3)
    (done,) = [event for event in run.events if isinstance(event, EvalDone)]
    assert done.metrics.keys() == ({"loss", "perplexity"} if tokens else {"loss"})
    assert ("eval_perplexity" in run.result.metrics) is tokens
    assert run.result.metrics["eval_loss"] == done.metrics["loss"]


def test_evaluating_does_not_disturb_training(tmp_path):
    class Drawing(ToyTask):
        def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            if not model.training:
                torch.rand(3), random.random(), np.random.rand()
            return super().loss(model, batch)

    often = play(tmp_path / "a", model=Toy(dropout=0.3), task=Drawing(), eval_every=1)
    never = play(tmp_path / "b", model=Toy(dropout=0.3), eval_rows=[], eval_every=None)
    assert often.losses == never.losses
    assert same(often.weights, never.weights)


def test_dropout_is_off_in_the_evaluation_and_on_in_training(tmp_path):
    seen: list[tuple[bool, bool]] = []

    class Watching(ToyTask):
        def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            seen.append((torch.is_grad_enabled(), model.get_submodule("dropout").training))
            return super().loss(model, batch)

    play(tmp_path, task=Watching())
    assert set(seen) == {(True, True), (False, False)}


def test_the_model_is_left_in_the_modes_it_was_found_in(tmp_path):
    model = Toy()
    model.eval()
    model.lora_A.train()
    play(tmp_path, model=model)
    assert {name for name, module in model.named_modules() if module.training} == {"lora_A"}


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    torch.manual_seed(1)
    random.seed(1)
    first = play(tmp_path / "a", model=Toy(dropout=0.3))
    again = play(tmp_path / "b", model=Toy(dropout=0.3))
    other = play(tmp_path / "c", model=Toy(dropout=0.3), seed=1)
    assert first.losses == again.losses
    assert same(first.weights, again.weights)
    assert first.losses != other.losses


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({}, 12), ({"epochs": 0.5}, 2), ({"max_steps": 7}, 7), ({"epochs": 1.1}, 5)],
)
def test_a_run_has_max_steps_steps(tmp_path, changes, steps):
    assert len(play(tmp_path, save_every=None, **changes).losses) == steps
    assert config_of(tmp_path, **changes).num_steps(14) == steps


def test_steps_are_counted_without_float_dust():
    # 0.1 x 30 steps is 3.0000000000000004 in floats
    assert TrainConfig(epochs=0.1, batch_size=1).num_steps(30) == 3


def test_metrics_jsonl_has_a_line_for_every_event(tmp_path):
    run = play(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        type(event).__name__ for event in run.events if not isinstance(event, Stage | Progress)
    ]
    assert [line["loss"] for line in lines if line["event"] == "StepDone"] == run.losses


def test_metrics_jsonl_goes_on_after_a_line_cut_short(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "StepDone", "st')
    play(tmp_path, max_steps=1)
    cut, *lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert cut == '{"event": "StepDone", "st'
    assert json.loads(lines[0])["event"] == "RunStarted"


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path):
    play(tmp_path, max_steps=2)
    before = sorted(tmp_path.rglob("*"))
    play(tmp_path, max_steps=2).failed(OutputError, "already holds a run")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_holds_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"precious")
    assert isinstance(play(tmp_path).error, OutputError)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"precious"


def test_overwrite_starts_anew(tmp_path):
    first = play(tmp_path, max_steps=5)
    again = play(tmp_path, max_steps=2, overwrite=True)
    assert again.error is None
    assert again.losses[0] == first.losses[0]
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-1", "step-2"]


def test_a_file_as_output_folder_is_refused_before_the_model_changes(tmp_path):
    (tmp_path / "runs").write_text("")
    play(tmp_path / "runs").failed(OutputError)


def test_defaults_suffice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = fit(Toy(), ToyTask(), make_rows(8))
    assert result.step == 3
    assert (tmp_path / "runs" / "adapter" / "checkpoints" / "step-3").is_dir()


class Diverging(ToyTask):
    """Its eval loss is NaN."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        return loss if model.training else loss * float("nan")


def test_an_eval_loss_that_is_not_finite_is_told_and_never_best(tmp_path):
    run = play(tmp_path, task=Diverging())
    assert run.result.best_step is None
    assert any("eval loss after step 12 is nan" in text for text in run.notices)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_evaluations_that_are_not_finite_count_as_no_better(tmp_path):
    stopping = EarlyStopping(patience=2)
    run = play(tmp_path, task=Diverging(), eval_every=2, save_every=1, early_stopping=stopping)
    assert run.error is None
    assert run.result.step == 4
    assert any("eval loss was not finite in 2 evaluations" in text for text in run.notices)


def test_checkpoints_hold_what_the_weights_write(tmp_path):
    class Text:
        def __init__(self) -> None:
            self.loaded: list[str] = []

        def save(self, folder: Path) -> None:
            (folder / "deep").mkdir()
            (folder / "deep" / "adapter.txt").write_text("weights")

        def load(self, folder: Path) -> None:
            self.loaded.append((folder / "deep" / "adapter.txt").read_text())

    config, weights = config_of(tmp_path, max_steps=2), Text()
    fit(Toy(), ToyTask(), make_rows(14), config=config, weights=weights)
    listed = json.loads((tmp_path / "checkpoints" / "step-2" / "MANIFEST.json").read_text())[
        "files"
    ]
    assert "deep/adapter.txt" in listed
    fit(Toy(), ToyTask(), make_rows(14), config=config, weights=weights, resume=True)
    assert weights.loaded == ["weights"]


def test_a_second_run_into_a_folder_is_refused_and_names_the_first(tmp_path):
    others: list[Played] = []

    def again(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 1:
            others.append(play(tmp_path, resume=False, save_every=None))

    first = play(tmp_path, on_event=again, save_every=None)
    assert first.error is None
    others[0].failed(OutputError, f"Process {os.getpid()} on ")
    assert others[0].losses == []
    assert play(tmp_path, resume=True).error is None


@pytest.mark.parametrize(
    ("error", "state"), [(Crash(), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_the_log_of_a_run_has_its_end(tmp_path, error, state):
    def end(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            raise error

    run = play(tmp_path, on_event=end)
    assert run.error is error
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"], last["state"]) == ("RunStopped", 3, state)
    assert read_history(tmp_path).state() == state
    assert play(tmp_path, resume=True).error is None
    assert read_history(tmp_path).state() == "finished"
