"""Drift: zero without training, equal to its definition, and a limit for the best weights."""

import json
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peftkit.adapter import attach
from peftkit.config.schema import from_dict
from peftkit.data.general import ANCHORS, MEASURED
from peftkit.errors import AdapterError, ConfigError, DataError
from peftkit.evaluation.drift import Drift, text_rows
from peftkit.events import EvalDone, Notice, StepDone
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from peftkit.settings import DriftConfig
from peftkit.tasks.text.anchor import AnchoredLM, AnchorRow
from peftkit.train.batches import BatchPrefetcher
from tests.helpers.command_line import Run
from tests.helpers.finished import supervised

WEIGHTS = "adapter_model.safetensors"


def drift_of(model, tokenizer, adapter, **config):
    return Drift(model, tokenizer, adapter.disabled, DriftConfig(**config))


def plant(model, scale):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.normal_(0, scale)


@pytest.mark.parametrize("on", ["self", "text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_has_none(llama, tokenizer, dtype, on):
    adapter = attach(llama.to(dtype), LoRA(rank=2, targets="all-linear"))
    measured = drift_of(llama, tokenizer, adapter, on=on, tokens=200).measure()
    assert measured.pop("drift") == 0.0
    assert measured in ({}, {"drift_95": 0.0, "drift_same": 1.0})


def test_a_planted_update_has_the_kl_of_its_definition(llama, tokenizer):
    adapter = attach(llama, LoRA(rank=2, targets="all-linear"))
    drift = drift_of(llama, tokenizer, adapter)
    assert drift.measure()["drift"] == 0.0  # the answers are those of the base
    plant(llama, 0.3)
    measured = drift.measure()
    kls, same, number = [], 0, 0
    for row in drift._rows:
        ids = torch.tensor([row.input_ids])
        now = llama.eval()(ids).logits[0].double().log_softmax(-1)
        with adapter.disabled():
            before = llama(ids).logits[0].double().log_softmax(-1)
        places = [n - 1 for n, label in enumerate(row.labels) if label >= 0]
        kls += (before.exp() * (before - now)).sum(-1)[places].tolist()
        same += (before.argmax(-1) == now.argmax(-1))[places].sum().item()
        number += len(places)
    assert measured["drift"] == pytest.approx(sum(kls) / number, rel=1e-4)
    assert measured["drift"] > 0.01
    rank = 0.95 * (number - 1)  # between two tokens: linear
    low, high = sorted(kls)[int(rank) : int(rank) + 2]
    quantile = low + (rank - int(rank)) * (high - low)
    assert measured["drift_95"] == pytest.approx(quantile, rel=1e-4)
    assert measured["drift_95"] > measured["drift"]
    assert measured["drift_same"] == pytest.approx(same / number)
    assert len(drift._rows) == len(MEASURED)


def test_the_model_before_training_runs_once(llama, tokenizer):
    adapter, entered = attach(llama, LoRA(rank=2, targets="all-linear")), []

    @contextmanager
    def before():
        entered.append(len(entered))
        with adapter.disabled():
            yield

    drift = Drift(llama, tokenizer, before, DriftConfig())
    drift.measure()
    first = len(entered)
    plant(llama, 0.3)
    assert drift.measure() == drift.measure()
    assert len(entered) == first == 4  # the answers, and three batches


def test_an_adapted_head_is_compared_by_logits(llama, tokenizer):
    adapter = attach(llama, LoRA(rank=2, targets=("q", "lm_head")))
    drift = drift_of(llama, tokenizer, adapter)
    assert drift.measure()["drift"] == 0.0
    plant(llama, 0.3)
    assert drift.measure()["drift"] > 0.01


def test_a_text_has_the_rise_of_its_cross_entropy(llama, tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 9)
    adapter = attach(llama, LoRA(rank=2, targets="all-linear"))
    plant(llama, 0.3)
    measured = drift_of(llama, tokenizer, adapter, on=str(file), tokens=60).measure()

    def loss():
        (row,) = text_rows(tokenizer, [file.read_text()], 60)
        ids = torch.tensor([row.input_ids])
        return llama.eval()(ids, labels=ids).loss.item()

    now = loss()
    with adapter.disabled():
        before = loss()
    assert measured == {"drift": pytest.approx(now - before, abs=1e-5)}
    with pytest.raises(DataError, match=r"train\.drift\.on"):
        drift_of(llama, tokenizer, adapter, on=str(tmp_path / "b.txt"))


def test_no_prompt_is_measured_and_trained_on():
    assert not set(MEASURED) & set(ANCHORS)
    assert len(set(MEASURED)) == 24
    assert len(set(ANCHORS)) == 32


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path):
    rows = [{"instruction": f"Say yes {n}.", "output": f"yes {n}"} for n in range(8)]
    train = {"max_steps": 3, "batch_size": 2, "learning_rate": 0.02, "eval_every": 1}
    return supervised(tmp_path, model_folder, rows, rows, **train)


def run(settings, out, *, resume=False, task=None, **train):
    events = []
    more = {"task": {"type": "causal_lm", **task}} if task else {}
    train = {**settings["train"], "output_dir": str(out), **train}
    run_recipe(
        from_dict(Recipe, {**settings, **more, "train": train}, "test"),
        resume=resume,
        on_event=events.append,
    )
    return events


def evals(events):
    return {e.step: e.metrics for e in events if isinstance(e, EvalDone)}


@pytest.mark.covers("peftkit")
def test_a_run_measures_it_without_effect_on_its_weights(settings, tmp_path, peftkit: Run):
    run(settings, tmp_path / "plain", eval_before=True)
    figures = evals(run(settings, tmp_path / "run", drift={}, eval_before=True))
    plain, measured = (load_file(tmp_path / name / WEIGHTS) for name in ("plain", "run"))
    assert all((plain[name] == measured[name]).all() for name in plain)
    assert figures[0]["drift"] == 0.0
    assert 0 < figures[1]["drift"] < figures[3]["drift"]
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert any(json.loads(line).get("metrics", {}).get("drift") for line in written.splitlines())
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"| eval drift | {figures[3]['drift']:.4g} |" in card
    result = peftkit("eval", str(tmp_path / "run"), "--drift", "--json")
    assert json.loads(result.out)["drift"] == pytest.approx(figures[3]["drift"], rel=1e-3)


@pytest.mark.covers("peftkit/evaluation", "peftkit/tasks", "peftkit/train")
def test_a_limit_bounds_the_best_weights(settings, tmp_path):
    free = evals(run(settings, tmp_path / "free", drift={}))
    limit = (free[1]["drift"] + free[2]["drift"]) / 2
    run(settings, tmp_path / "run", drift={"limit": limit}, keep_best=True, keep_checkpoints=3)
    kept = load_file(tmp_path / "run" / WEIGHTS)
    wanted = load_file(tmp_path / "run" / "checkpoints" / "step-1" / WEIGHTS)
    assert all((kept[name] == wanted[name]).all() for name in wanted)
    events = run(settings, tmp_path / "none", drift={"limit": 1e-9}, keep_best=True)
    assert [e for e in events if isinstance(e, Notice) and "No evaluation was within" in e.text]


@pytest.mark.covers("peftkit/evaluation", "peftkit/tasks", "peftkit/train")
def test_a_resumed_run_measures_the_same(settings, tmp_path):
    more = {"drift": {}, "save_every": 1, "keep_checkpoints": 3}
    whole = evals(run(settings, tmp_path / "run", **more))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    resumed = evals(run(settings, tmp_path / "run", resume=True, **more))
    assert resumed == {3: whole[3]}


def test_other_tasks_are_refused(settings, tmp_path):
    settings["task"] = {"type": "masked_lm"}
    with pytest.raises(ConfigError, match=r"train\.drift"):
        run(settings, tmp_path / "run", drift={})


@pytest.mark.covers("peftkit/evaluation", "peftkit/tasks", "peftkit/train")
def test_an_anchor_holds_the_model_back(settings, tmp_path):
    more = {"drift": {}, "max_steps": 6, "eval_every": 6}
    free = run(settings, tmp_path / "free", **more)
    anchored = run(settings, tmp_path / "anchored", task={"anchor": 4.0}, **more)
    drifts = [evals(events)[6]["drift"] for events in (free, anchored)]
    assert drifts[1] < 0.7 * drifts[0]
    assert "anchor_kl" not in evals(anchored)[6]
    steps = [e for e in anchored if isinstance(e, StepDone)]
    assert steps[0].figures["anchor_kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[-1].figures["anchor_kl"] > 0


@pytest.mark.covers("peftkit/evaluation", "peftkit/tasks", "peftkit/train")
def test_a_step_with_an_anchor_is_collated_ahead(settings, tmp_path, monkeypatch):
    def losses(name):
        events = run(settings, tmp_path / name, task={"anchor": 1.0}, eval_every=9)
        return [e.loss for e in events if isinstance(e, StepDone)]

    plain = losses("plain")
    collate, threads = AnchoredLM.collate, []

    def seen(self, rows):
        if any(isinstance(row, AnchorRow) for row in rows):
            threads.append(threading.current_thread().name)
        return collate(self, rows)

    monkeypatch.setattr(AnchoredLM, "collate", seen)
    monkeypatch.setattr(BatchPrefetcher, "is_ahead", True)  # as on a GPU
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert losses("ahead") == plain
    # three steps with one micro-batch of anchor rows each; only the first step waits for them
    assert [name.startswith("collate") for name in threads] == [False] + [True] * 2


def test_an_anchor_needs_the_head(settings, tmp_path):
    settings["method"] |= {"targets": ["q", "lm_head"]}
    with pytest.raises(AdapterError, match=r"task\.anchor"):
        run(settings, tmp_path / "run", task={"anchor": 1.0})
