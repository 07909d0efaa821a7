"""A member of a sweep is the run that it would be alone."""

import csv
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from peftkit.errors import ConfigError, OutputError, PeftkitError, TargetError
from peftkit.events import Event, Notice, Progress, Stage, StepDone, Table
from peftkit.execution.signals import Interrupted
from peftkit.figures import recent_mean
from peftkit.formats.peft.load import named_tensors
from peftkit.inference.bank import check_name
from peftkit.recipe import load
from peftkit.run import run
from peftkit_cli.sweeps import Outcome, _write, check_members, grid, pick, sweep
from tests.helpers.families import FAMILIES, tiny_tokenizer
from tests.helpers.folders import write_rows

WORDS = ("yes", "no", "perhaps", "of course not", "why do you ask")
ROWS = [
    {"instruction": f"Say {word} {n}.", "output": f"{word} {n}"} for n in range(4) for word in WORDS
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    FAMILIES["llama"]().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    data = folder / "train.jsonl"
    write_rows(data, ROWS)
    settings: dict[str, dict[str, Any]] = {
        "base": {"model": str(model), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 4, "targets": ["attention"]},
        "data": {"train": str(data), "eval": str(data), "max_length": 64, "packing": False},
        "train": {"max_steps": 2, "batch_size": 3, "learning_rate": 5.0e-3, "eval_every": 2},
    }
    merged = {n: {**settings.get(n, {}), **sections.get(n, {})} for n in {**settings, **sections}}
    merged = {
        n: {k: v for k, v in section.items() if v is not None} for n, section in merged.items()
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(merged))
    return folder / "recipe.yaml"


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "learning_rate" in entry]


def alone(recipe: Path, settings: Mapping[str, Any], folder: Path) -> Path:
    changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    run(load(recipe, [*changes, f"train.output_dir={folder}"]))
    return folder


def as_saved(folder: Path) -> dict[str, Any]:
    """Return what a run has saved, apart from dates and its own folder."""
    notes = json.loads((folder / "peftkit.json").read_text())
    return {
        "losses": losses(folder),
        "plan": notes["plan"],
        "config": (folder / "adapter_config.json").read_text(),
        "tensors": {name: tensor.tolist() for name, tensor in named_tensors(folder).items()},
    }


PACKED = {"data": {"packing": True}, "train": {"gradient_checkpointing": True}}
DIFFERENT = """
lora: {method.rank: 3, method.targets: [q, v]}
pissa: {method.init: pissa, data.max_length: 32}
norms: {method.type: ln_tuning}
prompt: {method.type: prompt_tuning, data.packing: false, train.seed: 4}
whole: {method.rank: 2, method.train_fully: [lm_head], method.dropout: 0.2}
pairs: {method.rank: 2, task.type: preference, data.train: PAIRS, data.eval: PAIRS}
last: {method.rank: 3, method.targets: [q, v]}
"""


@pytest.mark.parametrize("quantize", ["none", pytest.param("nf4", marks=pytest.mark.slow)])
def test_members_equal_their_runs_alone(quantize, base, tmp_path):
    sections = {"base": {"quantize": quantize}, "method": {"rank": None, "targets": None}}
    recipe = write(tmp_path / "data", base, **sections, **PACKED)
    pairs = tmp_path / "data" / "pairs.jsonl"
    row = {"prompt": "Say yes.", "chosen": "yes", "rejected": "no"}
    pairs.write_text((json.dumps(row) + "\n") * 6)
    picked = tmp_path / "members.yaml"
    picked.write_text(DIFFERENT.replace("PAIRS", str(pairs)))
    members = pick(recipe, picked, out=tmp_path / "out")
    outcomes = sweep(members, tmp_path / "out")
    assert not [outcome.error for outcome in outcomes if outcome.state != "done"]
    by_name = {outcome.name: outcome for outcome in outcomes}
    for member in members:
        folder = tmp_path / "out" / member.name
        single = alone(recipe, member.settings, tmp_path / f"alone-{member.name}")
        assert as_saved(folder) == as_saved(single), member.name
        assert by_name[member.name].loss == recent_mean(losses(folder))
        assert by_name[member.name].eval_loss is not None
    assert as_saved(tmp_path / "out" / "lora") == as_saved(tmp_path / "out" / "last")


@pytest.mark.smoke
def test_the_best_member_is_copied_and_all_are_told(base, tmp_path):
    recipe = write(tmp_path / "data", base)
    members = grid(recipe, ["train.learning_rate=1e-6,5e-3"], out=tmp_path / "out")
    events: list[Event] = []
    best, other = sweep(members, tmp_path / "out", on_event=events.append)
    assert (best.name, other.name) == tuple(member.name for member in reversed(members))
    saved = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert saved["best"] == best.name
    assert [entry["name"] for entry in saved["members"]] == [member.name for member in members]
    tensors = named_tensors(tmp_path / "out" / "best")
    for name, tensor in named_tensors(Path(best.folder)).items():
        assert torch.equal(tensors[name], tensor)
    report = (tmp_path / "out" / "report.html").read_text()
    assert all(f">{member.name}<" in report for member in members)
    table = next(e for e in events if isinstance(e, Table) and e.title.startswith("The sweep"))
    assert [row[0] for row in table.rows] == [best.name, other.name]


def test_members_that_differ_in_their_seed_are_averaged(tmp_path):
    values = {"a": (8, 0, 1.0, 0.5), "b": (8, 1, 3.0, 0.7), "c": (16, 0, 1.5, 0.6)}
    outcomes = {
        name: Outcome(
            name,
            {"method.rank": rank, "train.seed": seed},
            str(tmp_path / name),
            state="done",
            eval_loss=loss,
            metrics={"f1_macro": f1},
            best_metric="f1_macro",
        )
        for name, (rank, seed, loss, f1) in values.items()
    }
    _write(tmp_path, outcomes)
    (group,) = json.loads((tmp_path / "sweep.json").read_text())["over_seeds"]
    assert (group["settings"], group["num_seeds"]) == ({"method.rank": 8}, 2)
    assert group["eval_loss"] == {"mean": 2.0, "std": pytest.approx(2**0.5)}
    assert group["f1_macro"]["mean"] == pytest.approx(0.6)
    head, *rows = csv.reader((tmp_path / "sweep.csv").read_text().splitlines())
    assert [row[head.index("eval_f1_macro")] for row in rows] == ["0.5", "0.7", "0.6"]
    assert [row[head.index("train.seed")] for row in rows] == ["0", "1", "0"]
    ranked = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
    assert [outcome.name for outcome in ranked] == ["b", "c", "a"]


def test_the_base_loads_once_and_equal_rows_are_encoded_once(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    recipe = write(tmp_path / "data", base)
    over = ["method.rank=2,3", "data.max_length=48,64"]
    events: list[Event] = []
    members = grid(recipe, over, out=tmp_path / "out")
    sweep(members, tmp_path / "out", on_event=events.append)
    stages = [event.text for event in events if isinstance(event, Stage)]
    assert sum(text.startswith("Loading") for text in stages) == 1, stages
    assert sum(isinstance(e, Progress) and "Encoding" in e.text for e in events) == 2
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert len(set(notices)) == len(notices) > 0, "what holds for all members is said once"


def test_a_member_that_fails_fails_alone(base, tmp_path):
    recipe = write(tmp_path / "data", base)
    over = ["train.learning_rate=1e-3,1e30,2e-3"]
    members = grid(recipe, over, out=tmp_path / "out")
    events: list[Event] = []
    outcomes = sweep(members, tmp_path / "out", on_event=events.append)
    assert [outcome.state for outcome in outcomes] == ["done", "done", "failed"]
    assert outcomes[2].name == members[1].name
    assert "loss of nan" in outcomes[2].error
    assert any(isinstance(e, Notice) and "the sweep continues" in e.text for e in events)
    single = alone(recipe, members[2].settings, tmp_path / "alone")
    assert as_saved(tmp_path / "out" / members[2].name) == as_saved(single)
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["members"][1]["error"]


def test_a_loss_that_is_not_finite_at_the_end_ends_no_sweep(base, tmp_path):
    recipe = write(tmp_path / "data", base, train={"max_steps": 1, "eval_every": 1})
    members = grid(recipe, ["train.learning_rate=1e-3,1e30,2e-3"], out=tmp_path / "out")
    outcomes = sweep(members, tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["done", "done", "done"]
    assert [outcome.eval_loss is None for outcome in outcomes] == [False, False, True]
    assert outcomes[2].name == members[1].name


def test_a_sweep_holds_the_folders_of_all_its_members(base, tmp_path):
    recipe = write(tmp_path / "one", base)
    out = tmp_path / "out"
    members = grid(recipe, ["method.rank=2,3"], out=out)
    refused: list[str] = []

    def train_into_both(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 1:
            for member in members:
                with pytest.raises(OutputError, match="another process is training into") as error:
                    run(member.recipe, overwrite=True)
                refused.append(str(error.value))

    sweep(members, out, on_event=train_into_both)
    assert len(refused) == 4
    assert not list((out / "best").glob("**/holder"))


def test_an_error_before_any_step_ends_the_sweep(base, tmp_path):
    recipe = write(tmp_path / "data", base, data={"train": str(tmp_path / "nowhere.jsonl")})
    members = grid(recipe, ["method.rank=2,3"], out=tmp_path / "out")
    with pytest.raises(PeftkitError, match="nowhere"):
        sweep(members, tmp_path / "out")
    targets = write(tmp_path / "data", base)
    members = grid(targets, ["method.targets=[q],[u]"], out=tmp_path / "out")
    with pytest.raises(TargetError, match="'u'"):  # before the first member is trained
        sweep(members, tmp_path / "out")
    assert not (tmp_path / "out" / "sweep.json").exists()


@pytest.mark.parametrize("stop_in", [1, 2], ids=["first", "second"])
def test_an_interrupted_sweep_ends_equal(stop_in, base, tmp_path):
    recipe = write(tmp_path / "data", base, train={"max_steps": 3, "save_every": 1})
    over = ["method.rank=2,3"]
    complete = sweep(grid(recipe, over, out=tmp_path / "complete"), tmp_path / "complete")
    steps = 0

    def interrupt(event: Event) -> None:
        nonlocal steps
        steps += isinstance(event, StepDone)
        if isinstance(event, StepDone) and steps == 3 * stop_in - 1:
            os.kill(os.getpid(), signal.SIGINT)

    members = grid(recipe, over, out=tmp_path / "out")
    with pytest.raises(Interrupted, match="Continue with --resume"):
        sweep(members, tmp_path / "out", on_event=interrupt)
    with pytest.raises(OutputError, match="already holds a sweep"):
        sweep(members, tmp_path / "out")
    with pytest.raises(OutputError, match="has other members"):
        sweep(
            grid(recipe, ["method.rank=2,4"], out=tmp_path / "out"), tmp_path / "out", resume=True
        )
    events: list[Event] = []
    resumed = sweep(members, tmp_path / "out", resume=True, on_event=events.append)
    assert sum(isinstance(event, StepDone) for event in events) == 6 - (3 * stop_in - 1)
    assert [(o.name, o.steps, o.loss) for o in resumed] == [
        (o.name, o.steps, o.loss) for o in complete
    ]
    for outcome in resumed:
        tensors = named_tensors(Path(outcome.folder))
        for name, tensor in named_tensors(tmp_path / "complete" / outcome.name).items():
            assert torch.equal(tensors[name], tensor)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["base.dtype=fp32,bf16"], "base.dtype differs"),
        (["train.shard=none,base"], "several processes"),
        (["method.rank=8,8"], "the same"),
        (["method.rank=8"], "from 2 to 256"),
        (["method.rank="], "no values"),
        (["method.rank=8", "method.rank=9"], "each once"),
        ([], "at least one"),
    ],
)
def test_bad_sweeps_are_refused(over, message, base, tmp_path):
    recipe = write(tmp_path / "data", base)
    with pytest.raises(ConfigError) as error:
        check_members(grid(recipe, over, out=tmp_path / "out"))
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_members_with_other_labels_need_another_base(base, tmp_path):
    recipe = write(tmp_path / "data", base, train={"max_steps": 1}, data={"max_length": None})
    for labels in ("ab", "ac"):
        rows = [{"text": "yes or no", "label": label} for label in labels]
        write_rows(tmp_path / f"{labels}.jsonl", rows)
    classify = ["task=sequence_classification", "data.packing=true", "data.eval=null"]
    over = [f"data.train={tmp_path}/ab.jsonl,{tmp_path}/ac.jsonl"]
    with pytest.raises(ConfigError, match="the task's form of the base differs"):
        check_members(grid(recipe, over, classify, out=tmp_path / "out"))


def test_serve_takes_the_names_of_members(base, tmp_path):
    recipe = write(tmp_path / "data", base)
    over = ["method.targets=[q, v],../up", "train.learning_rate=1e-4"]
    names = [member.name for member in grid(recipe, over, out=tmp_path)]
    assert names == ["targets-_q_v__learning_rate-1e-4", "targets-__up_learning_rate-1e-4"]
    for name in names:
        check_name(name)


def test_members_are_picked_by_name(base, tmp_path):
    recipe = write(tmp_path / "data", base)
    file = tmp_path / "members.yaml"
    file.write_text("small: {method.rank: 2}\nlarge: {method.rank: 9, train.seed: 3}\n")
    picked = {m.name: dict(m.settings) for m in pick(recipe, file, out=tmp_path)}
    assert picked == {"small": {"method.rank": 2}, "large": {"method.rank": 9, "train.seed": 3}}
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="does not name the members"):
        pick(recipe, file, out=tmp_path)


@pytest.mark.parametrize(
    ("url", "urls"),
    [
        ("s3://b/runs/", ["s3://b/runs/rank-2", "s3://b/runs/rank-3"]),
        ("hf://org/name", ["hf://org/name-rank-2", "hf://org/name-rank-3"]),
    ],
)
def test_each_member_is_uploaded_to_its_own_place(base, url, urls, tmp_path):
    recipe = write(tmp_path / "data", base)
    members = grid(recipe, ["method.rank=2,3"], [f"train.upload={url}"], out=tmp_path / "out")
    assert [member.recipe.train.upload for member in members] == urls
