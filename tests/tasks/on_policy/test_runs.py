"""Runs that learn from rewards: what they tell, how they end, and that they resume to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peftkit import open_adapter, recipe
from peftkit.base.load import load_base
from peftkit.config.schema import from_dict
from peftkit.data.load import DataConfig, Record
from peftkit.errors import ConfigError, PeftkitError, RunError
from peftkit.events import EvalDone, Event, Notice, RolledOut, StepDone
from peftkit.formats.continued import read_side_adapter
from peftkit.planning.plan import plan_run
from peftkit.run.config import Recipe
from peftkit_cli.app import run
from tests.tasks.preference.cases import moved_adapter

REWARDS = """
import asyncio, time

def share_of_o(prompts, completions, **columns):
    return [text.count("o") / (len(text) + 1) for text in texts(completions)]

async def later(prompts, completions, word, **columns):
    await asyncio.sleep(0)
    assert len(word) == len(completions)
    return [None if n % 2 else float(len(text)) for n, text in enumerate(texts(completions))]

def texts(completions):
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]

def always(prompts, completions, **columns):
    return [1.0] * len(completions)

def short(prompts, completions, **columns):
    return [1.0]

def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)

def raises(prompts, completions, **columns):
    raise KeyError("price")

def hangs(prompts, completions, **columns):
    time.sleep(60)
"""


@pytest.fixture
def asked(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a recipe of six prompts: two a step, four answers each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"the quick brown {n}", "word": str(n)} for n in range(6)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def made(
        *functions: str, out: str = "run", task: dict[str, Any] | None = None, **train: Any
    ) -> Recipe:
        data = {
            "task": {
                "type": "grpo",
                "rewards": [{"use": f"rewards.py:{name}"} for name in functions],
                "answers": 4,
                "max_new_tokens": 8,
                "mask_cut": False,
                **(task or {}),
            },
            "base": {"model": str(model_folder), "dtype": "fp32"},
            "method": {"type": "lora", "rank": 4},
            "data": {"train": "p.jsonl", "max_length": 64},
            "train": {
                "output_dir": out,
                "max_steps": 4,
                "batch_size": 2,
                "learning_rate": 0.02,
                "save_every": 1,
                "compile": False,
                **train,
            },
        }
        return from_dict(Recipe, data, "the test")

    return made


Asked = Callable[..., Recipe]


def test_a_run_tells_rewards_and_keeps_all_answers(asked: Asked, tmp_path: Path) -> None:
    events: list[Event] = []
    asked_for = asked("share_of_o", "later")
    recipe.run(asked_for, on_event=events.append)
    steps = [event for event in events if isinstance(event, StepDone)]
    assert len(steps) == 4
    told = steps[0].figures
    names = {"reward", "reward_std", "reward_share_of_o", "reward_later", "taught", "cut", "length"}
    assert names | {"entropy", "clipped_low", "clipped_high"} <= told.keys()
    assert {"rollout_seconds", "learn_seconds"} <= told.keys()
    rolled = [event for event in events if isinstance(event, RolledOut)]
    rewards = [answer.reward for answer in rolled[0].answers]
    assert len(rewards) == 8
    assert told["reward"] == pytest.approx(sum(rewards) / 8, rel=1e-5)
    lines = (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 8
    assert json.loads(lines[0])["parts"].keys() == {"share_of_o", "later"}


def test_rewards_rise(asked: Asked) -> None:
    events: list[Event] = []
    recipe.run(
        asked("share_of_o", task={"answers": 8}, max_steps=25, learning_rate=0.03),
        on_event=events.append,
    )
    told = [event.figures["reward"] for event in events if isinstance(event, StepDone)]
    assert sum(told[-5:]) > 2 * sum(told[:5])


def test_a_resumed_run_ends_with_the_same_bits(asked: Asked, tmp_path: Path) -> None:
    more = {"kl": 0.1, "updates": 2}
    recipe.run(asked("share_of_o", out="whole", task=more))

    def end(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recipe.run(asked("share_of_o", out="halves", task=more), on_event=end)
    recipe.run(asked("share_of_o", out="halves", task=more), resume=True)
    whole, halves = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "halves")
    )
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("short", r"short returned 1 for 8"),
        ("nan", r"nan returned nan .* p\.jsonl:\d"),
        ("raises", r"KeyError: 'price'(.|\n)*p\.jsonl:\d"),
        ("hangs", r"hangs took longer than 1 seconds(.|\n)*p\.jsonl:\d"),
        ("always", r"20 steps in a row taught nothing(.|\n)* 1"),
    ],
)
def test_a_reward_that_cannot_be_used_ends_the_run(function: str, told: str, asked: Asked) -> None:
    events: list[Event] = []
    made = asked(function, task={"reward_timeout": 1.0}, max_steps=30, save_every=None)
    with pytest.raises(RunError, match=told):
        recipe.run(made, on_event=events.append)
    if function == "always":
        steps = [event for event in events if isinstance(event, StepDone)]
        assert len(steps) == 19
        assert {(step.loss, step.figures["taught"]) for step in steps} == {(0.0, 0.0)}


def test_what_was_learnt_before_a_reward_failed_is_saved(asked: Asked, tmp_path: Path) -> None:
    file, events = tmp_path / "rewards.py", list[Event]()
    file.write_text(
        f"CALLS = [0]\n{REWARDS}\n"
        + """
def fails_later(prompts, completions, **columns):
    CALLS[0] += 1
    return share_of_o(prompts, completions) if CALLS[0] < 3 else []
"""
    )
    with pytest.raises(RunError, match="returned 0 for 8"):
        recipe.run(asked("fails_later", save_every=None), on_event=events.append)
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()


def test_a_change_of_the_functions_is_no_exact_resume(asked: Asked, tmp_path: Path) -> None:
    recipe.run(asked("share_of_o"))
    (tmp_path / "rewards.py").write_text(REWARDS + "\n# changed\n")
    with pytest.raises(PeftkitError, match=r"rewards\.rewards\.py:share_of_o"):
        recipe.run(asked("share_of_o", max_steps=4), resume=True)


def test_evaluations_are_rewards_of_greedy_answers(asked: Asked) -> None:
    events: list[Event] = []
    made = asked("share_of_o", eval_every=2)
    made = made.model_copy(update={"data": made.data.model_copy(update={"eval": "p.jsonl"})})
    result = recipe.run(made, on_event=events.append)
    evals = [event for event in events if isinstance(event, EvalDone)]
    assert [event.step for event in evals] == [2, 4]
    assert evals[0].metrics["loss"] == -evals[0].metrics["reward"]
    assert result.metrics["eval_loss"] == evals[1].metrics["loss"]


def test_a_model_that_has_grown_sure_ends_the_run(asked: Asked, tmp_path: Path) -> None:
    events: list[Event] = []
    result = recipe.run(
        asked("share_of_o", task={"stop_entropy": 50.0}, save_every=None), on_event=events.append
    )
    steps = [event for event in events if isinstance(event, StepDone)]
    assert len(steps) == 1
    assert any("stop_entropy: 50" in event.text for event in events if isinstance(event, Notice))
    assert result.step == 1
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("term", "told"),
    [
        ({"use": "rewards.py:absent"}, "no function absent"),
        ({"use": "nowhere.py:f"}, "no file nowhere.py"),
        ({"use": "regex"}, "regex needs pattern"),
        ({"use": "length", "max_chars": 3, "pattern": "x"}, "length takes no pattern"),
        ({"use": "regex", "pattern": "("}, "is no pattern"),
    ],
)
def test_a_reward_that_is_not_there_is_refused(
    term: dict[str, Any], told: str, asked: Asked
) -> None:
    with pytest.raises(ConfigError, match=told):
        recipe.run(asked(task={"rewards": [term]}))


def test_functions_that_a_foreign_recipe_names_are_not_run(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.run(asked("share_of_o", max_steps=1))
    (tmp_path / "rewards.py").write_text("raise SystemExit('it ran')")
    for asked_for in (["train", "--from", "run"], ["train", "run/recipe.yaml"]):
        assert run([*asked_for, "--out", "again"]) == 2
        told = capsys.readouterr().err
        assert "rewards.py:share_of_o" in told
        assert "it ran" not in told
    opened = open_adapter("run")  # nor does opening it
    assert opened.style is not None
    (tmp_path / "rewards.py").write_text(REWARDS)
    mine = "task.rewards=[{use: 'rewards.py:share_of_o'}]"
    assert run(["train", "--from", "run", "--out", "again", "--set", mine]) == 0


def test_a_reward_adapter_over_the_same_base_is_a_reward(asked: Asked, model_folder: Path) -> None:
    pairs = [
        {"prompt": f"the quick brown {n}", "chosen": "a fox jumps", "rejected": "the dog"}
        for n in range(4)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    learn = {"output_dir": "judge", "max_steps": 3, "learning_rate": 0.02, "save_every": None}
    spec = {
        "task": {"type": "reward"},
        "base": {"model": str(model_folder), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 4},
        "data": {"train": "pairs.jsonl", "max_length": 64},
        "train": learn,
    }
    recipe.run(from_dict(Recipe, spec, "the test"))
    events: list[Event] = []
    terms = [{"adapter": "judge", "weight": 0.5}, {"use": "length", "max_chars": 40}]
    recipe.run(asked(task={"rewards": terms}, max_steps=1), on_event=events.append)
    (rolled,) = [event for event in events if isinstance(event, RolledOut)]
    for one in rolled.answers:
        assert one.reward == pytest.approx(0.5 * one.parts["adapter"] + one.parts["length"])
    with pytest.raises(PeftkitError, match="task grpo"):
        recipe.run(asked(task={"rewards": [{"adapter": "run"}]}, out="again"))
    # what it says is what the reward model says of the same texts
    prompts, texts = ["the dog", "a quick fox and ", "pizza"], ["jumps", "the lazy dog", ""]
    task = asked(task={"rewards": terms[:1]}).task
    base = load_base(str(model_folder), dtype="fp32")
    moved = moved_adapter(base.model)
    ids = torch.tensor([[5, 9, 4]])
    policy = base.model(input_ids=ids).logits
    judged: Any = task.on(base.model, base.tokenizer, DataConfig(train="p.jsonl", max_length=64))
    judged.add_adapter("judge", read_side_adapter("judge", base))
    with torch.no_grad(), judged.training(base.model):
        said = judged._scores(base.model, "judge", prompts, texts)
    opened = open_adapter("judge", str(model_folder))
    rows = [
        Record({"prompt": prompt, "completion": text}, "a row")
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    known = opened.task.on(opened.base.model, opened.base.tokenizer, judged.data)
    expected = known.predict_rows(opened.base.model, rows)
    assert said == pytest.approx([row["score"] for row in expected], abs=1e-5)
    assert torch.equal(base.model(input_ids=ids).logits, policy)
    assert all(module.enabled for module in moved.modules.values())


def test_a_plan_counts_all_answers_of_a_prompt(asked: Asked) -> None:
    few, many = (
        plan_run(asked("share_of_o", task={"answers": n}), memory="8GB", measure=False)
        for n in (2, 8)
    )
    assert many.chosen.by_category["activations"] > 3 * few.chosen.by_category["activations"]
