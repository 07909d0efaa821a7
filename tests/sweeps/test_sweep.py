"""A member of a sweep is the run that it would be alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from peftkit.adapter import attach
from peftkit.errors import ConfigError, OutputError
from peftkit.events import Event, Notice, Progress
from peftkit.formats.peft.folder import named_tensors
from peftkit.methods.lora import LoRA
from peftkit.model.modes import evaluating
from peftkit.recipe import run
from peftkit.run.config import load
from peftkit.sweeps.layers import Mounted, Routing
from peftkit.sweeps.members import check_members, grid, pick
from peftkit.sweeps.sweep import sweep
from tests.families import FAMILIES, tiny_tokenizer

WORDS = ("yes", "no", "perhaps", "of course not", "why do you ask")
ROWS = [
    {"instruction": f"Say {word} {n}.", "output": f"{word} {n}"} for n in range(4) for word in WORDS
]


class Bases(dict[str, Path]):
    """A tiny model of a family, saved when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, family: str) -> Path:
        torch.manual_seed(0)
        model, folder = FAMILIES[family](), self.folder / family
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout_rate"):
            setattr(model.config, name, 0.0)  # else draws are another batch's
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return self.setdefault(family, folder)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


def write(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings: dict[str, dict[str, Any]] = {
        "base": {"model": str(model), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 4, "targets": ["attention"]},
        "data": {"train": str(data), "eval": str(data), "max_length": 64, "packing": False},
        "train": {"max_steps": 2, "batch_size": 3, "learning_rate": 5.0e-3, "eval_every": 2},
    }
    merged = {n: {**settings.get(n, {}), **sections.get(n, {})} for n in {**settings, **sections}}
    merged = {n: {k: v for k, v in own.items() if v is not None} for n, own in merged.items()}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(merged))
    return folder / "recipe.yaml"


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "learning_rate" in entry]


def alone(recipe: Path, overrides: list[str], folder: Path) -> list[float]:
    run(load(recipe, [*overrides, f"train.output_dir={folder}"]))
    return losses(folder)


NF4 = {"base": {"quantize": "nf4"}}
SLOW: list[tuple[str, list[str], dict[str, dict[str, Any]]]] = [
    *((family, ["method.rank=2,5"], {}) for family in ("qwen2", "qwen3", "phi3", "gpt_neox")),
    ("gemma2", ["train.batch_size=1,4", "train.seed=1,2"], {}),
    ("mixtral", ["method.rank=2,5"], {}),
    ("llama", ["method.rank=2,3"], {"base": {"quantize": "nf4", "placement": "stream"}}),
    ("t5", ["method.rank=2,5"], {"task": {"type": "seq2seq"}, "data": {"packing": None}}),
    ("llama", ["method.init=gaussian,eva"], {}),
    ("llama", ["method.rslora=true,false", "method.init=pissa,default"], {}),
    ("llama", ["method.init=loftq,olora"], NF4),
    ("llama", ["method.type=dora,vera"], {"method": {"rank": None}, **NF4}),
    ("gpt2", ["method.type=ia3,lora"], {"method": {"rank": None}}),
    ("llama", ["method.rank=2,7", "train.learning_rate=1e-3,1e-2"], {}),
    ("llama", ["method.init=default,pissa,olora"], NF4),
]
"""Families and methods, each with another member beside it."""


@pytest.mark.parametrize(
    ("family", "over", "sections"),
    [
        ("llama", ["method.type=lora,dora,vera"], {"method": {"rank": None}}),
        (
            "gpt2",
            ["method.targets=[q],attention"],
            {
                "data": {"packing": True},
                "train": {"gradient_checkpointing": True, "gradient_accumulation": 2},
            },
        ),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=[
        *("method", "fused-packed"),
        *(f"{case[0]}-{case[1][-1].partition('.')[2]}" for case in SLOW),
    ],
)
def test_a_member_is_the_run_that_it_would_be_alone(
    family: str,
    over: list[str],
    sections: dict[str, dict[str, Any]],
    bases: Bases,
    tmp_path: Path,
) -> None:
    recipe = write(tmp_path / "data", bases[family], **sections)
    if sections.get("method"):  # methods differ in their settings
        settings = yaml.safe_load(recipe.read_text())
        settings["method"] = {"type": "lora", "targets": ["q", "v"]}
        recipe.write_text(yaml.safe_dump(settings))
    members = grid(recipe, over, out=tmp_path / "out")
    outcomes = sweep(members, tmp_path / "out")
    assert {outcome.state for outcome in outcomes} == {"done"}
    by_name = {outcome.name: outcome for outcome in outcomes}
    for member in members:
        own = [f"{key}={json.dumps(value)}" for key, value in member.settings.items()]
        expected = alone(recipe, own, tmp_path / f"alone-{member.name}")
        found = losses(tmp_path / "out" / member.name)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        one, other = (
            named_tensors(folder)
            for folder in (tmp_path / "out" / member.name, tmp_path / f"alone-{member.name}")
        )
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-4)
        assert by_name[member.name].eval_loss is not None
    best = json.loads((tmp_path / "out" / "sweep.json").read_text())["best"]
    assert best == outcomes[0].name
    assert named_tensors(tmp_path / "out" / "best").keys()
    report = (tmp_path / "out" / "report.html").read_text()
    assert all(f">{member.name}<" in report for member in members)


def test_members_are_in_the_mode_of_their_model() -> None:
    model = FAMILIES["llama"]()
    adapter = attach(model, LoRA(rank=2, dropout=0.5, targets=("q",)))
    adapter.take_out()
    mounted = Mounted(model.train(), {"a": adapter.modules})
    module: Any = next(iter(adapter.modules.values()))
    assert module.dropout.training
    with evaluating(model):
        assert not module.dropout.training
    assert module.dropout.training
    mounted.remove()


def test_a_member_that_breaks_stops_alone(bases: Bases, tmp_path: Path) -> None:
    recipe = write(tmp_path / "data", bases["llama"])
    members = grid(recipe, ["train.learning_rate=1e-3,1e30"], out=tmp_path / "out")
    heard: list[Event] = []
    outcomes = sweep(members, tmp_path / "out", on_event=heard.append)
    assert [outcome.state for outcome in outcomes] == ["done", "failed"]
    assert any(isinstance(e, Notice) and "the others go on" in e.text for e in heard)
    assert len(losses(Path(outcomes[0].folder))) == 2
    assert math.isfinite(outcomes[0].eval_loss or math.inf)
    assert load(Path(outcomes[0].folder) / "recipe.yaml") == members[0].recipe


def test_a_stopped_sweep_is_resumed_to_the_same_end(
    bases: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write(tmp_path / "data", bases["llama"], train={"save_every": 1})
    over = ["train.max_steps=2,3"]
    whole = sweep(grid(recipe, over, out=tmp_path / "whole"), tmp_path / "whole")

    def stop_after_one(event: Event) -> None:
        if isinstance(event, Progress) and event.done == 1 and "Training" in event.text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(grid(recipe, over, out=tmp_path / "out"), tmp_path / "out", on_event=stop_after_one)
    members = grid(recipe, over, out=tmp_path / "out")
    with pytest.raises(OutputError, match="already holds a sweep"):
        sweep(members, tmp_path / "out")
    rest = sweep(members, tmp_path / "out", resume=True)
    assert [o.name for o in rest] == [o.name for o in whole]
    for outcome in rest:
        found = named_tensors(Path(outcome.folder))
        for name, tensor in named_tensors(tmp_path / "whole" / outcome.name).items():
            assert torch.equal(found[name], tensor)


def test_memory_that_runs_out_makes_passes_smaller(
    bases: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write(tmp_path / "data", bases["llama"])
    over = ["method.rank=2,3,4"]
    whole = sweep(grid(recipe, over, out=tmp_path / "whole"), tmp_path / "whole")
    real = Routing.to

    def small(self: Any, *pieces: Any) -> Any:
        if len(pieces) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, *pieces)

    monkeypatch.setattr(Routing, "to", small)
    less = sweep(grid(recipe, over, out=tmp_path / "less"), tmp_path / "less")
    for a, b in zip(whole, less, strict=True):
        assert losses(Path(a.folder)) == pytest.approx(losses(Path(b.folder)), rel=1e-5)


@pytest.mark.parametrize(
    ("over", "told"),
    [
        (["base.dtype=fp32,bf16"], "base.dtype differs"),
        (["data.max_length=32,64"], "data.max_length differs"),
        (["method.type=lora,bitfit"], "bitfit"),
        (["train.eval_before=true,false"], "train.eval_before"),
        (["train.gradient_checkpointing=true,false"], "train.gradient_checkpointing differs"),
        (["method.rank=8,8"], "the same"),
        (["method.rank="], "no values"),
        (["method.rank=8", "method.rank=9"], "each once"),
        ([], "at least one"),
    ],
)
def test_what_cannot_go_together_is_refused_by_name(
    over: list[str], told: str, bases: Bases, tmp_path: Path
) -> None:
    recipe = write(tmp_path / "data", bases["llama"], method={})
    settings = yaml.safe_load(recipe.read_text())
    settings["method"] = {"type": "lora"}
    recipe.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError) as error:
        check_members(grid(recipe, over, out=tmp_path / "out"))
    assert told in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "targets", "named"),
    [("mixtral", "all-linear", "experts"), ("llama", ["lm_head", "q"], "lm_head")],
)
def test_what_is_not_a_piece_of_the_batch_is_refused_by_name(
    family: str, targets: Any, named: str, bases: Bases, tmp_path: Path
) -> None:
    recipe = write(tmp_path / "data", bases[family], method={"targets": targets})
    with pytest.raises(ConfigError, match="cannot be trained together") as error:
        sweep(grid(recipe, ["method.rank=2,3"], out=tmp_path / "out"), tmp_path / "out")
    assert named in str(error.value)
    assert "targets" in str(error.value)
    assert not (tmp_path / "out" / "sweep.json").exists()


def test_members_are_picked_by_name(bases: Bases, tmp_path: Path) -> None:
    recipe = write(tmp_path / "data", bases["llama"])
    file = tmp_path / "members.yaml"
    file.write_text("small: {method.rank: 2}\nlarge: {method.rank: 9, train.seed: 3}\n")
    found = {m.name: dict(m.settings) for m in pick(recipe, file, out=tmp_path)}
    assert found == {"small": {"method.rank": 2}, "large": {"method.rank": 9, "train.seed": 3}}
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="does not name the members"):
        pick(recipe, file, out=tmp_path)
