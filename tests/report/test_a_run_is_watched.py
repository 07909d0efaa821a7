"""What a run does besides learning: samples, metrics of answers, the best weights, an early end."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError, DataError, RunError
from peftkit.events import EvalDone, Event, Notice, RunStarted, Sampled, StepDone
from peftkit.inference.cached_engine import CachedEngine
from peftkit.recipe import Recipe
from peftkit.report.history import RunFacts
from peftkit.report.page import write_report
from peftkit.run import run as run_recipe
from peftkit_cli.train import _function
from tests.helpers.finished import supervised
from tests.helpers.folders import write_rows

ROWS = [
    {"instruction": f"Say {word} {n}.", "output": f"{word} {n}"}
    for n in range(4)
    for word in ("yes", "no")
]
TENSORS = "adapter_model.safetensors"


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    train = {"max_steps": 4, "batch_size": 2, "learning_rate": 5e-3, "eval_every": 2}
    told = supervised(tmp_path, model_folder, ROWS, ROWS[:3], **train)
    told["method"]["dropout"] = 0.1
    return told


def run(settings: dict[str, Any], out: Path, **train: Any) -> list[Event]:
    events: list[Event] = []
    more = {name: train.pop(name) for name in ("metrics", "resume") if name in train}
    whole = {**settings, "train": {**settings["train"], "output_dir": str(out), **train}}
    recipe = from_dict(Recipe, whole, "test")
    run_recipe(recipe, on_event=events.append, **more)
    return events


@pytest.mark.covers("peftkit")
def test_watching_changes_no_weight(settings, tmp_path):
    def broken(completion: str, reference: str) -> float:
        raise ZeroDivisionError

    run(settings, tmp_path / "plain")
    events = run(
        settings,
        tmp_path / "watched",
        sample_every=2,
        sample_tokens=5,
        eval_generate=2,
        eval_before=True,
        metrics={"size": lambda completion, reference: float(len(reference)), "mine": broken},
    )
    plain, watched = (load_file(tmp_path / name / TENSORS) for name in ("plain", "watched"))
    assert all((plain[name] == watched[name]).all() for name in plain)
    assert [e.step for e in events if isinstance(e, Sampled)] == [0, 2, 4]
    evals = [e for e in events if isinstance(e, EvalDone)]
    assert [e.step for e in evals] == [0, 2, 4]
    assert {"loss", "exact_match", "rouge_l", "size"} <= set(evals[0].metrics)
    assert all("mine" not in e.metrics for e in evals)
    assert len([e for e in events if isinstance(e, Notice) and "mine" in e.text]) == 1
    assert evals[0].metrics["size"] == pytest.approx((len("yes 0") + len("no 0")) / 2)
    assert not evals[0].best
    written = (tmp_path / "watched" / "samples.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert len(lines) == 3 * 3  # three times the three eval rows, though they share a packed row
    assert "Say yes 0." in lines[0]["prompt"]
    assert lines[0]["reference"] == "yes 0"
    text = write_report([tmp_path / "watched"], tmp_path / "report.html").read_text()
    assert "Say no 0." in text
    assert "Lengths of the train rows" in text
    assert "A training row" in text
    facts = json.loads((tmp_path / "watched" / "run.json").read_text())
    assert facts.keys() == RunFacts.model_fields.keys()


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize("fits", [1, 0])
def test_memory_that_runs_out_while_it_generates_halves_the_prompts_at_once(
    fits, settings, tmp_path, monkeypatch
):
    real = CachedEngine._advance

    def short(engine: CachedEngine) -> None:
        real(engine)
        is_trial = engine.limits.prefill == 4  # whether the model can be served by this engine
        if not is_trial and engine.num_running > fits:
            raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(CachedEngine, "_advance", short)
    if not fits:
        with pytest.raises(RunError, match="during one completion"):
            run(settings, tmp_path / "run", sample_every=4, max_steps=1, sample_tokens=3)
        return
    prompts = ("Say yes 2.", "Say no 3.")
    more = {"sample_tokens": 3, "sample_prompts": prompts}
    events = run(settings, tmp_path / "run", sample_every=2, max_steps=2, **more)
    notices = [e.text for e in events if isinstance(e, Notice) and "prompts at a time" in e.text]
    assert [text.split(":")[1].split()[0] for text in notices][-1:] == [str(fits)]
    first, _ = [e for e in events if isinstance(e, Sampled)]
    assert [s.source for s in first.samples] == [f"train.sample_prompts[{n}]" for n in (0, 1)]
    assert "Say no 3." in first.samples[1].prompt
    assert first.samples[0].reference is None


@pytest.mark.parametrize("prompt", ["", "yes " * 5000])
def test_bad_prompts_are_refused(settings, tmp_path, prompt):
    settings["data"]["packing"] = False
    rows = json.dumps({"prompt": "a", "completion": "b"}) + "\n"  # asked as they stand
    for name in ("train", "eval"):
        Path(settings["data"][name]).write_text(rows * 4)
    with pytest.raises(DataError, match=r"train\.sample_prompts\[0\]"):
        run(settings, tmp_path / "run", sample_every=2, sample_prompts=(prompt,))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize("loss", ["orpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_preferences_log_their_samples(settings, tmp_path, loss):
    pairs = [(f"say {n} ", f"yes {n}", "no") for n in range(4)]
    rows = [{"prompt": p, "chosen": good, "rejected": bad} for p, good, bad in pairs]
    if loss == "kto":
        rows = [
            {"prompt": p, "completion": a, "label": a != "no"} for p, *both in pairs for a in both
        ]
    for name in ("train", "eval"):
        write_rows(Path(settings["data"][name]), rows)
    settings["task"] = {"type": "preference", "loss": loss}
    more = {"sample_every": 2, "sample_tokens": 3, "sample_prompts": ("say 9 ",)}
    events = run(settings, tmp_path / "run", max_steps=2, eval_generate=3, **more)
    (first, *_) = [event for event in events if isinstance(event, Sampled)]
    assert [sample.prompt for sample in first.samples] == ["say 9"]
    assert any("eval_exact_match" in e.metrics or "exact_match" in e.metrics
               for e in events if isinstance(e, EvalDone))  # fmt: skip


def test_the_adapter_can_be_the_best_weights(settings, tmp_path):
    other = json.dumps({"instruction": "Say yes 0.", "output": "~~~~~~"}) + "\n"
    Path(settings["data"]["eval"]).write_text(other)  # what is learnt makes this no likelier
    late = {"learning_rate": 0.05, "schedule": "constant", "eval_every": 1, "max_steps": 6}
    events = run(settings, tmp_path / "run", keep_best=True, keep_checkpoints=6, **late)
    losses = {e.step: e.metrics["loss"] for e in events if isinstance(e, EvalDone)}
    best = min(losses, key=lambda step: losses[step])
    assert best < 6
    kept, last = (
        load_file(tmp_path / "run" / place / TENSORS) for place in (".", "checkpoints/step-6")
    )
    wanted = load_file(tmp_path / "run" / f"checkpoints/step-{best}" / TENSORS)
    assert all((kept[name] == wanted[name]).all() for name in wanted)
    assert any((kept[name] != last[name]).any() for name in wanted)
    assert any(f"weights of step {best}" in e.text for e in events if isinstance(e, Notice))
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"| eval loss | {losses[best]:.4g} |" in card
    assert f"| eval perplexity | {math.exp(losses[best]):.4g} |" in card


@pytest.mark.covers("peftkit")
def test_early_stopping_survives_a_resume(settings, tmp_path):
    stopping = {"early_stopping": {"patience": 2, "min_delta": 1e9}, "eval_every": 1}
    events = run(settings, tmp_path / "run", max_steps=5, **stopping)
    steps = [e.step for e in events if isinstance(e, StepDone)]
    assert steps == [1, 2, 3]  # the first is the lowest, two are no better
    assert (tmp_path / "run" / TENSORS).is_file()
    again = run(settings, tmp_path / "run", max_steps=5, resume=True, **stopping)
    assert not [e for e in again if isinstance(e, StepDone)]
    assert [e.start_step for e in again if isinstance(e, RunStarted)] == [3]
    stopping["early_stopping"] = None
    on = run(settings, tmp_path / "run", max_steps=5, resume=True, **stopping)
    assert [e.step for e in on if isinstance(e, StepDone)] == [4, 5]


@pytest.mark.parametrize(
    ("train", "data", "message"),
    [
        ({"keep_best": True}, {"eval": None}, r"train\.keep_best needs eval rows"),
        ({"sample_every": 2}, {"eval": None}, "sample_every, without sample_prompts"),
        ({"early_stopping": {"patience": 0}}, {}, "patience"),
    ],
)
def test_what_has_nothing_to_look_at_is_refused(settings, tmp_path, train, data, message):
    settings["data"] |= data
    with pytest.raises(ConfigError, match=message):
        run(settings, tmp_path / "run", **train)


def test_a_metric_needs_answers(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.eval_generate is not set"):
        run(settings, tmp_path / "run", metrics={"mine": lambda a, b: 1.0})


def test_metrics_are_named_by_function(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text("half = lambda completion, reference: 0.5\nn = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert _function("my_scores:half")("a", "b") == 0.5
    for name in ("half", "no_such_module_of_mine:f", "my_scores:absent", "my_scores:n"):
        with pytest.raises(ConfigError):
            _function(name)
