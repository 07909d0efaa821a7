"""The anchor of causal_lm: its KL by definition, however the base and the rows are held."""

import math
from pathlib import Path

import pytest
import torch

from peftkit import defaults
from peftkit.config.schema import from_dict
from peftkit.data.general import ANCHORS
from peftkit.defaults import MAX_ANCHORS
from peftkit.events import StepDone
from peftkit.formats.open_adapter import open_adapter
from peftkit.inference.generate import own_answers
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.tasks import run_hooks
from peftkit.tasks.text.anchor import LENGTH, SEED
from tests.helpers.classifiers import save_base
from tests.helpers.families import ARCHITECTURES
from tests.helpers.hybrids import HYBRIDS
from tests.helpers.sharded import events, run_ranks, settings_of

SLOW_FAMILIES = ("gemma3_text", "gpt_oss", "lfm2", "mamba2", "mixtral")
WAYS = {
    "alone": {},
    "packed": {"data": {"packing": True}},
    "one row at a time": {"train": {"tokens_per_batch": 1}},
    "accumulated": {"train": {"batch_size": 1, "gradient_accumulation": 2}},
    "recomputed": {"train": {"gradient_checkpointing": True}},
    "nf4": {"base": {"quantize": "nf4"}},
}


def recipe_of(tmp_path, *, steps=2, **sections) -> Recipe:
    """Return a recipe of some steps with an anchor, at a constant learning rate."""
    train = {"max_steps": steps, "schedule": "constant", "warmup_ratio": 0.0, "eval_every": None}
    sections["train"] = train | {"output_dir": str(tmp_path / "run")} | sections.get("train", {})
    sections["data"] = {"packing": False} | sections.get("data", {})
    settings = settings_of(tmp_path / "rows", "causal_lm", **sections)
    return from_dict(Recipe, settings | {"task": {"type": "causal_lm", "anchor": 1.0}}, "test")


def steps_of(recipe: Recipe, **options) -> list[StepDone]:
    """Return the steps of a run."""
    seen = []
    run(recipe, on_event=seen.append, **options)
    return [event for event in seen if isinstance(event, StepDone)]


def kl_of_step(folder, step: int, per_step: int) -> float:
    """Return the mean KL over a step's answers with an adapter's weights, row by row."""
    opened = open_adapter(folder)
    model, total, number = opened.base.model.eval(), 0.0, 0
    with opened.adapter.disabled():
        rows = own_answers(model, opened.base.tokenizer, ANCHORS, length=LENGTH, seed=SEED)
    first = (step - 1) * per_step
    for row in rows[first : first + per_step]:
        ids = torch.tensor([row.input_ids[:64]])
        now = model(ids).logits[0].double().log_softmax(-1)
        with opened.adapter.disabled():
            before = model(ids).logits[0].double().log_softmax(-1)
        places = [n - 1 for n, label in enumerate(row.labels[:64]) if label >= 0]
        total += (before.exp() * (before - now)).sum(-1)[places].sum().item()
        number += len(places)
    return total / number


@pytest.mark.parametrize(
    "way", [way if way == "packed" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_a_step_reports_the_kl_of_its_answers(way, tmp_path, monkeypatch):
    monkeypatch.setattr(defaults, "ANCHOR_SHARE", 100.0)  # the maximum, although rows are short
    sections = WAYS[way]
    first, second = steps_of(recipe_of(tmp_path, **sections))
    assert first.figures["anchor_kl"] == pytest.approx(0.0, abs=1e-6)
    steps_of(recipe_of(tmp_path, steps=1, **sections), overwrite=True)
    expected = kl_of_step(tmp_path / "run", 2, MAX_ANCHORS)
    assert expected > 1e-3
    assert second.figures["anchor_kl"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.smoke
def test_the_loss_adds_the_kl_times_its_weight(tmp_path):
    first, second = steps_of(recipe_of(tmp_path, train={"learning_rate": 0.02}))
    without = recipe_of(tmp_path, train={"learning_rate": 0.02})
    without = without.model_copy(update={"task": without.task.model_copy(update={"anchor": None})})
    plain_first, plain_second = steps_of(without, overwrite=True)
    assert first.loss == pytest.approx(plain_first.loss, rel=1e-6)
    # the weights of the first step are equal: there, the KL and its gradient are zero
    added = second.loss - plain_second.loss
    assert added == pytest.approx(second.figures["anchor_kl"], rel=1e-3)


def test_the_answers_share_the_only_batch_of_a_step(tmp_path, monkeypatch):
    parts = []
    split = run_hooks.split_micro_batches

    def recorded(rows, *limits):
        parts.append([len(part) for part in split(rows, *limits)])
        return split(rows, *limits)

    monkeypatch.setattr(run_hooks, "split_micro_batches", recorded)
    size = 4
    steps_of(recipe_of(tmp_path, train={"batch_size": size, "tokens_per_batch": 1024}))
    assert parts
    assert all(part in ([size], [size + 1]) for part in parts), parts
    assert [size + 1] in parts


def test_a_resumed_run_has_the_same_losses(tmp_path):
    whole = [step.loss for step in steps_of(recipe_of(tmp_path, steps=4))]
    half = recipe_of(tmp_path, steps=4, train={"save_every": 2})

    class Stopped(Exception):
        pass

    def stop(event):
        if isinstance(event, StepDone) and event.step == 3:
            raise Stopped

    with pytest.raises(Stopped):
        run(half, overwrite=True, on_event=stop)
    assert [step.loss for step in steps_of(half, resume=True)] == whole[2:]


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)]
)
def test_other_families_start_at_zero(family, tmp_path):
    base = save_base(tmp_path / "base", model={**ARCHITECTURES, **HYBRIDS}[family]())
    first, second = steps_of(recipe_of(tmp_path, base={"model": str(base)}))
    assert first.figures["anchor_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second.figures["anchor_kl"] > 0


@pytest.mark.slow
def test_a_process_without_rows_takes_part_in_the_step(tmp_path):
    """Three rows on two processes: the last step of an epoch has one."""
    rows = settings_of(tmp_path / "rows", "causal_lm", train={"shard": "none", "batch_size": 1})
    file = tmp_path / "three.jsonl"
    lines = Path(rows["data"]["train"]).read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join(lines[:3]), encoding="utf-8")
    rows["data"] = {"train": str(file), "packing": False, "max_length": 64}
    rows["train"] |= {"eval_every": None}
    rows["task"] = {"type": "causal_lm", "anchor": 1.0}
    (tmp_path / "out").mkdir()
    assert not run_ranks(tmp_path / "out", {"three": rows})
    losses = [event["loss"] for event in events(tmp_path / "out" / "three")]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))
