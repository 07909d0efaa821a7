"""Runs that learn from rewards: what they tell, how they end, and that they resume to the bit."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit import open_adapter
from peftkit.base.load import load_base
from peftkit.data.records import Record
from peftkit.errors import ConfigError, PeftkitError, RunError
from peftkit.events import EvalDone, Event, Notice, RolledOut, StepDone
from peftkit.formats.open_adapter import read_side_adapter
from peftkit.inference.generate import generate
from peftkit.inference.open_engine import open_engine
from peftkit.model.modes import adapters_off
from peftkit.planning.plan import plan_run
from peftkit.run import run as run_recipe
from peftkit.settings import DataConfig
from peftkit.tasks.documents import OnPolicyTask
from peftkit.tasks.rewards.reward_functions import Rewards, RewardTerm
from peftkit_cli.app import run
from tests.helpers.finished import WEIGHTS, Finished, finished, recipe, replaced
from tests.helpers.folders import write_rows as write
from tests.helpers.on_policy import REWARDS, reward_recipe
from tests.helpers.pair_cases import moved_adapter

Asked = Callable[..., dict[str, Any]]


@pytest.fixture
def asked(tmp_path: Path, model_folder: Path) -> Asked:
    return partial(reward_recipe, tmp_path, model_folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Finished:
    folder = tmp_path_factory.mktemp("grpo")
    told = reward_recipe(folder, model_folder, "share_of_o", "later", kl=0.1, updates=2)
    told["data"]["eval"] = told["data"]["train"]
    return finished(told, train={"save_every": 1, "eval_every": 2})


@pytest.mark.smoke
def test_a_run_tells_rewards_and_keeps_all_answers(done):
    steps = done.of_kind(StepDone)
    assert len(steps) == 4
    told = steps[0].figures
    names = {"reward", "reward_std", "reward_share_of_o", "reward_later", "taught", "cut", "length"}
    assert names | {"entropy", "clipped_low", "clipped_high"} <= told.keys()
    assert {"rollout_seconds", "learn_seconds"} <= told.keys()
    rewards = [answer.reward for answer in done.of_kind(RolledOut)[0].answers]
    assert len(rewards) == 8
    assert told["reward"] == pytest.approx(sum(rewards) / 8, rel=1e-5)
    lines = (done.folder / "answers.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["parts"].keys() == {"share_of_o", "later"}


@pytest.mark.smoke
def test_evaluations_are_rewards_of_greedy_answers(done):
    evals = done.of_kind(EvalDone)
    assert [event.step for event in evals] == [2, 4]
    assert evals[0].metrics["loss"] == -evals[0].metrics["reward"]
    assert done.metrics["eval_loss"] == evals[1].metrics["loss"]


def test_eval_gives_the_rewards_of_greedy_answers(done, model_folder, tmp_path, capsys):
    command = ["eval", str(done.folder), "--data", str(done.told["data"]["train"]), "--json"]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out).keys() == {"cut", "length", "num_rows"}
    assert "rewards.py:later" in printed.err  # a file that is not run unasked
    assert run([*command, "--run-rewards", "--compare"]) == 0
    sides = json.loads(capsys.readouterr().out)
    last = done.of_kind(EvalDone)[1].metrics
    for name in ("reward", "reward_share_of_o", "reward_later", "length"):
        assert sides["adapter"][name] == pytest.approx(last[name], rel=1e-4)
    assert sides["base"]["reward"] != pytest.approx(sides["adapter"]["reward"], rel=1e-3)


def test_eval_counts_answers_that_are_the_rows_own(asked, tmp_path, capsys):
    Path(tmp_path, "schema.json").write_text('{"type": "object"}')
    told = asked(
        rewards=[
            {"use": "exact_match"},
            {"use": "json_schema", "schema_file": str(tmp_path / "schema.json")},
            {"use": "length", "max_chars": 9},
        ]
    )
    rows = [{"prompt": f"the quick brown {n}", "answer": "no"} for n in range(3)]
    told["data"]["train"] = write(tmp_path / "answered.jsonl", rows)
    folder = finished(told, train={"max_steps": 1}).folder
    Path(tmp_path, "schema.json").unlink()
    opened = open_adapter(folder)
    how = {"style": opened.style, "max_new_tokens": 8}
    (text,) = generate(opened.base.model, opened.base.tokenizer, "the quick brown 0", **how)
    rows[0]["answer"] = text
    file = write(tmp_path / "eval.jsonl", [*rows[:2], {"prompt": "the quick"}])
    assert run(["eval", str(folder), "--data", file]) == 0
    printed = capsys.readouterr()
    figures = dict(line.rsplit(maxsplit=1) for line in printed.out.splitlines())
    names = ["reward exact match", "reward length", "cut", "length", "exact match", "rows"]
    assert [*figures] == names
    assert figures["exact match"] == figures["reward exact match"] == "0.5"  # of two answers
    assert "json_schema is left out" in " ".join(printed.err.split())


def test_a_run_reports_that_it_trains_the_policy_that_it_samples(done):
    (text,) = (e.text for e in done.of_kind(Notice) if e.text.startswith("Sampler and trainer"))
    differs = float(text.split("up to ")[1].split()[0])
    assert differs < 1e-3  # float32, summed in another order


def test_a_process_without_prompts_checks_no_sampler():
    assert not OnPolicyTask.check_sampler(None, [], None)


def test_a_run_whose_sampler_ignores_the_adapter_stops(asked, monkeypatch):
    @contextmanager
    def bare(model: Any, *args: Any) -> Iterator[Any]:
        with adapters_off(model), open_engine(model, *args) as engine:
            yield engine

    monkeypatch.setattr("peftkit.tasks.documents.open_engine", bare)
    with pytest.raises(RunError, match="sampled from the base"):
        finished(asked("share_of_o"), train={"max_steps": 4})


def test_a_resumed_run_ends_with_the_same_bits(done, tmp_path):
    half = done.resumed(tmp_path / "half", "step-4")
    assert (half.folder / WEIGHTS).read_bytes() == (done.folder / WEIGHTS).read_bytes()
    refused = pytest.raises(PeftkitError, match=r"rewards\.py:share_of_o")
    with replaced(done.folder.parent / "rewards.py", REWARDS + "\n# changed\n"), refused:
        done.resumed(tmp_path / "changed", "step-4")


@pytest.mark.slow
def test_rewards_rise(asked):
    told = asked("share_of_o", answers=8)
    steps = finished(told, train={"max_steps": 25, "learning_rate": 0.03}).of_kind(StepDone)
    rewards = [step.figures["reward"] for step in steps]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("short", r"short returned 1 for 2"),
        ("nan", r"nan returned nan .* p\.jsonl:1"),
        ("huge", r"huge returned 10+ .* p\.jsonl:1"),
        ("endless", r"endless returned what is of the type int .* p\.jsonl:1"),
        ("pairs", r"pairs returned tensor\(.* p\.jsonl:1"),
        ("raises", r"KeyError: 'price'(.|\n)*p\.jsonl:1"),
        ("hangs", r"hangs took longer than 0\.1 seconds(.|\n)*p\.jsonl:1"),
    ],
)
def test_a_reward_that_cannot_be_used_is_an_error(function, told, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    judge = Rewards((RewardTerm(use=f"{tmp_path}/rewards.py:{function}"),), timeout=0.1)
    with pytest.raises(RunError, match=told):
        judge.judge(["a", "b"], ["o", "p"], {}, ["p.jsonl:1", "p.jsonl:2"])


def test_steps_without_signal_end_a_run(asked, monkeypatch):
    monkeypatch.setattr("peftkit.tasks.documents.MAX_EMPTY", 3)
    events: list[Event] = []
    with pytest.raises(RunError, match=r"3 steps in a row had nothing to train on(.|\n)* 1"):
        run_recipe(recipe(asked("always"), train={"max_steps": 9}), on_event=events.append)
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [(step.loss, step.figures["taught"]) for step in steps] == [(0.0, 0.0)] * 2


def test_a_run_of_equal_rewards_says_that_nothing_was_learnt(asked):
    events: list[Event] = []
    run_recipe(recipe(asked("always"), train={"max_steps": 2}), on_event=events.append)
    (text,) = (e.text for e in events if isinstance(e, Notice) and "No step was trained" in e.text)
    assert "had the same reward" in text
    events.clear()
    run_recipe(recipe(asked("share_of_o"), train={"max_steps": 2}), overwrite=True)
    assert not any(isinstance(e, Notice) and "No step was trained" in e.text for e in events)


def test_what_was_learnt_before_a_reward_failed_is_saved(asked, tmp_path):
    told = asked("fails_later")
    (tmp_path / "rewards.py").write_text(
        f"CALLS = [0]\n{REWARDS}\n"
        + """
def fails_later(prompts, completions, **columns):
    CALLS[0] += 1
    return share_of_o(prompts, completions) if CALLS[0] < 3 else []
"""
    )
    with pytest.raises(RunError, match="returned 0 for 8"):
        finished(told)
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()


def test_a_model_that_has_grown_sure_ends_the_run(asked):
    found = finished(asked("share_of_o", stop_entropy=50.0))
    assert len(found.of_kind(StepDone)) == 1
    assert any("stop_entropy: 50" in event.text for event in found.of_kind(Notice))
    assert (found.folder / WEIGHTS).is_file()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("term", "told"),
    [
        ({"use": "rewards.py:absent"}, "no function absent"),
        ({"use": "nowhere.py:f"}, "no file nowhere.py"),
        ({"use": "regex"}, "regex needs pattern"),
        ({"use": "length", "max_chars": 3, "pattern": "x"}, "length has no setting pattern"),
        ({"use": "regex", "pattern": "("}, "is not a valid pattern"),
    ],
)
def test_a_reward_that_is_not_there_is_refused(term, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    with pytest.raises(ConfigError, match=told):
        Rewards((RewardTerm(**term),), timeout=1.0)


def test_functions_named_by_a_foreign_recipe_never_run(done, tmp_path, capsys):
    file = done.folder.parent / "rewards.py"
    with replaced(file, "raise SystemExit('it ran')"):
        for given in (["--from", str(done.folder)], [str(done.folder / "recipe.yaml")]):
            assert run(["train", *given, "--out", str(tmp_path / "again")]) == 2
            told = capsys.readouterr().err
            assert "rewards.py:share_of_o" in told
            assert "it ran" not in told
        assert open_adapter(done.folder).style is not None  # nor does opening it
    mine = [f"task.rewards=[{{use: '{file}:share_of_o'}}]", "train.max_steps=1", "data.eval=null"]
    changes = [part for each in mine for part in ("--set", each)]
    given = ["--from", str(done.folder), "--out", str(tmp_path / "again")]
    assert run(["train", *given, *changes, "--set", "train.eval_every=null"]) == 0


def test_reward_adapters(asked, done, model_folder, tmp_path):
    # its end token is its padding, as in most bases: a score is read at the token before them
    base = load_base(str(model_folder), dtype="fp32")
    base.tokenizer.pad_token, base.model.config.pad_token_id = base.tokenizer.eos_token, None
    model_folder = tmp_path / "base"
    base.tokenizer.save_pretrained(model_folder)
    base.model.save_pretrained(model_folder)
    asked = partial(reward_recipe, tmp_path, model_folder)
    pairs = [
        {"prompt": f"the quick brown {n}", "chosen": "a fox jumps", "rejected": "the dog"}
        for n in range(4)
    ]
    judge = str(tmp_path / "judge")
    told = asked()
    told |= {"task": {"type": "reward"}}
    told["data"] = {"train": write(tmp_path / "pairs.jsonl", pairs), "max_length": 64}
    finished(told, train={"output_dir": judge, "max_steps": 3})
    terms = [{"adapter": judge, "weight": 0.5}, {"use": "length", "max_chars": 40}]
    (rolled,) = finished(asked(rewards=terms), train={"max_steps": 1}).of_kind(RolledOut)
    for one in rolled.answers:
        assert one.reward == pytest.approx(0.5 * one.parts["adapter"] + one.parts["length"])
    wrong = asked(rewards=[{"adapter": str(done.folder)}])
    with pytest.raises(PeftkitError, match="task grpo"):
        finished(wrong, train={"output_dir": str(tmp_path / "again")})
    # what it says is what the reward model says of the same texts
    prompts, texts = ["the dog", "a quick fox and ", "pizza"], ["jumps", "the lazy dog", ""]
    task = recipe(asked(rewards=terms[:1])).task
    base = load_base(str(model_folder), dtype="fp32")
    moved = moved_adapter(base.model)
    ids = torch.tensor([[5, 9, 4]])
    policy = base.model(input_ids=ids).logits
    judged: Any = task.on(base.model, base.tokenizer, DataConfig(train="p.jsonl", max_length=64))
    judged.add_adapter(judge, read_side_adapter(judge, base))
    with torch.no_grad(), judged.training(base.model):
        said = judged._scores(base.model, judge, prompts, texts)
    opened = open_adapter(judge, str(model_folder))
    rows = [
        Record({"prompt": prompt, "completion": text}, "a row")
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    known = opened.task.on(opened.base.model, opened.base.tokenizer, judged.rows.data)
    expected = known.predict_rows(opened.base.model, rows)
    assert said == pytest.approx([row["score"] for row in expected], abs=1e-5)
    assert torch.equal(base.model(input_ids=ids).logits, policy)
    assert all(module.enabled for module in moved.modules.values())


@pytest.mark.slow
def test_a_plan_counts_all_answers_of_a_prompt(asked):
    few, many = (
        plan_run(recipe(asked("share_of_o", answers=n)), memory="8GB", measure=False)
        for n in (2, 8)
    )
    assert many.chosen.by_category["activations"] > 3 * few.chosen.by_category["activations"]
