"""A resumed run is, to the bit, the run that was never stopped."""

import dataclasses
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peftkit.errors import CheckpointError
from peftkit.events import EvalDone, RunStarted
from peftkit.execution.state import state_from_json
from tests.helpers.toy import Crash, Played, Row, Toy, crash_after, make_rows, play, same

NUM_STEPS = 12  # 3 epochs of 4 steps, each epoch's last one smaller; 2 batches accumulated


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, Path]:
    """The run that was never stopped, with dropout."""
    folder = tmp_path_factory.mktemp("whole")
    return play(folder, model=Toy(dropout=0.3)), folder


def evals_of(*runs: Played) -> list[tuple[int, float, bool]]:
    events = [event for run in runs for event in run.events if isinstance(event, EvalDone)]
    return [(event.step, event.metrics["loss"], event.best) for event in events]


def assert_same_end(folder: Path, other: Path) -> None:
    """Compare all that the last checkpoints hold, wall-clock times apart."""
    a, b = (path / "checkpoints" / f"step-{NUM_STEPS}" for path in (folder, other))
    for name in ("weights", "optimizer", "rng"):
        assert (a / f"{name}.safetensors").read_bytes() == (b / f"{name}.safetensors").read_bytes()
    states = [json.loads((path / "state.json").read_text())["run"] for path in (a, b)]
    for state in states:
        del state["seconds"], state["step_seconds"]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(n, marks=() if n in (1, 3, 4, NUM_STEPS) else pytest.mark.slow)
        for n in range(1, NUM_STEPS + 1)
    ],
)
def test_resuming_anywhere_is_exact(tmp_path, whole, step):
    first = play(tmp_path, model=Toy(dropout=0.3), on_event=crash_after(step))
    rest = play(tmp_path, model=Toy(dropout=0.3), resume=True)
    first.failed(Crash)
    assert rest.error is None
    assert len(first.losses) == step
    assert first.losses + rest.losses == whole[0].losses
    assert evals_of(first, rest) == evals_of(whole[0])
    assert same(rest.weights, whole[0].weights)
    assert_same_end(tmp_path, whole[1])


def test_resuming_twice_changes_nothing(tmp_path, whole):
    runs = [play(tmp_path, model=Toy(dropout=0.3), on_event=crash_after(3))]
    runs.append(play(tmp_path, model=Toy(dropout=0.3), on_event=crash_after(8), resume=True))
    runs.append(play(tmp_path, model=Toy(dropout=0.3), resume=True))
    assert [len(run.losses) for run in runs] == [3, 5, 4]
    assert [loss for run in runs for loss in run.losses] == whole[0].losses
    assert_same_end(tmp_path, whole[1])


def test_the_best_evaluation_is_remembered(tmp_path):
    opposite = [Row((n, n), (-100, n), "eval") for n in range(20)]  # forgotten in training
    settings: dict[str, Any] = {"eval_rows": opposite, "eval_every": 1, "learning_rate": 0.3}
    whole = play(tmp_path / "a", **settings)
    first = play(tmp_path / "b", on_event=crash_after(10), **settings)
    rest = play(tmp_path / "b", resume=True, **settings)
    assert [best for *_, best in evals_of(whole)][9:] == [False] * 3
    assert evals_of(first, rest) == evals_of(whole)
    assert rest.result.best_step == whole.result.best_step
    assert rest.result.metrics["loss"] == whole.result.metrics["loss"]
    assert rest.result.best_checkpoint.is_dir()


def test_steps_after_a_checkpoint_repeat(tmp_path, whole):
    def crash(event: object) -> None:
        if getattr(event, "step", 0) == 8:
            raise Crash

    play(tmp_path, model=Toy(dropout=0.3), save_every=5, eval_every=None, on_event=crash)
    rest = play(tmp_path, model=Toy(dropout=0.3), save_every=5, eval_every=None, resume=True)
    started = [event for event in rest.events if isinstance(event, RunStarted)]
    assert started[0].start_step == 5
    assert rest.losses == whole[0].losses[5:]


def test_bf16_adapters_resume_to_the_bit(tmp_path):
    whole = play(tmp_path / "a", model=Toy(0.3, torch.bfloat16))
    play(tmp_path / "b", model=Toy(0.3, torch.bfloat16), on_event=crash_after(6))
    rest = play(tmp_path / "b", model=Toy(0.3, torch.bfloat16), resume=True)
    assert rest.losses == whole.losses[6:]
    assert same(rest.weights, whole.weights)


def test_resuming_a_finished_run_is_a_no_op(tmp_path, whole):
    play(tmp_path, model=Toy(dropout=0.3))
    again = play(tmp_path, model=Toy(dropout=0.3), resume=True)
    assert again.losses == []
    assert again.result.metrics["eval_loss"] == whole[0].result.metrics["eval_loss"]
    assert again.result.best_step == whole[0].result.best_step
    assert same(again.weights, whole[0].weights)


def test_resuming_where_nothing_was_saved_is_refused(tmp_path):
    play(tmp_path, resume=True).failed(CheckpointError, "no valid checkpoint")


def test_another_row_is_refused(tmp_path):
    play(tmp_path, on_event=crash_after(3))
    rows = make_rows(14)
    rows[7] = dataclasses.replace(rows[7], labels=(-100, *rows[7].labels[2:], 5))
    error = play(tmp_path, rows=rows, resume=True).failed(CheckpointError, "rows.train")
    assert "rows.eval" not in str(error)


def test_a_row_that_only_moved_in_its_file_is_the_same_row(tmp_path):
    play(tmp_path, on_event=crash_after(3))
    rows = [dataclasses.replace(row, source=f"elsewhere/{row.source}") for row in make_rows(14)]
    assert play(tmp_path, rows=rows, resume=True).error is None


def test_all_differences_are_listed_at_once_with_both_values(tmp_path):
    play(tmp_path, on_event=crash_after(1), identity={"base": {"fingerprint": "sha256:aa"}})
    error = play(
        tmp_path,
        resume=True,
        identity={"base": {"fingerprint": "sha256:bb"}, "method": {"rank": 8}},
        learning_rate=0.01,
    ).failed(CheckpointError)
    assert error.found.splitlines() == [
        'base.fingerprint: "sha256:aa" -> "sha256:bb"',
        "method.rank: (missing) -> 8",
        "train.learning_rate: 0.02 -> 0.01",
    ]


@pytest.mark.parametrize("allowed", ["train.learning_rate", "train"])
def test_a_change_that_is_allowed_is_told_and_takes_effect(tmp_path, allowed):
    play(tmp_path, on_event=crash_after(6))
    run = play(tmp_path, resume=True, learning_rate=0.01, allow_changes=[allowed])
    assert run.error is None
    assert any("train.learning_rate: 0.02 -> 0.01" in text for text in run.notices)
    assert len(run.losses) == 6


def test_more_epochs_can_be_allowed(tmp_path):
    play(tmp_path)
    run = play(tmp_path, resume=True, epochs=4.0, allow_changes=["train.epochs"])
    assert len(run.losses) == 4


def test_save_and_eval_intervals_may_change(tmp_path, whole):
    play(tmp_path, model=Toy(dropout=0.3), on_event=crash_after(5))
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)
    free = {
        "save_every": 7,
        "eval_every": 2,
        "keep_checkpoints": 5,
        "gradient_checkpointing": False,
    }
    model = Toy(dropout=0.3)
    rest = play(moved, model=model, resume=True, **free)
    assert rest.error is None
    assert rest.losses == whole[0].losses[5:]


def test_a_new_library_version_is_logged(tmp_path, monkeypatch):
    from peftkit.train import checkpoint, checkpoint_files

    play(tmp_path, on_event=crash_after(1))
    now = {**checkpoint_files.versions(), "torch": "9.9"}
    monkeypatch.setattr(checkpoint, "versions", lambda: now)
    run = play(tmp_path, resume=True)
    assert any("-> 9.9" in text for text in run.notices)


def test_weights_that_do_not_fit_the_model_are_refused_with_all_reasons(tmp_path):
    play(tmp_path, on_event=crash_after(1))
    model = Toy()
    model.lora_A = torch.nn.Linear(8, 2, bias=False)
    model.extra = torch.nn.Parameter(torch.zeros(2))
    error = play(tmp_path, model=model, resume=True).failed(CheckpointError)
    assert len(error.found.splitlines()) == 2


def test_a_checkpoint_is_free_of_pickle(tmp_path):
    play(tmp_path, max_steps=1)
    names = {path.name for path in (tmp_path / "checkpoints" / "step-1").iterdir()}
    tensors = {f"{name}.safetensors" for name in ("optimizer", "rng", "weights")}
    assert names == {"MANIFEST.json", "state.json", *tensors}
    assert "lora_A.weight" in load_file(tmp_path / "checkpoints" / "step-1" / "weights.safetensors")


def test_the_manifest_says_where_the_run_stands(tmp_path):
    play(tmp_path, max_steps=6, identity={"base": "sha256:aa"})
    manifest = json.loads((tmp_path / "checkpoints" / "step-6" / "MANIFEST.json").read_text())
    assert manifest["step"] == 6
    assert manifest["sampler"] == {"seed": 0, "epoch": 1, "position": 8}
    assert manifest["num_processes"] == 1
    assert manifest["identity"]["base"] == "sha256:aa"
    assert {"train", "rows", "num_processes"} <= manifest["identity"].keys()
    assert manifest["versions"]["torch"] == metadata.version("torch")


def test_a_state_that_lacks_something_is_refused():
    with pytest.raises(CheckpointError, match="from another version of peftkit"):
        state_from_json({"step": 7})
