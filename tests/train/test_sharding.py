"""A base that is spread over processes learns what one process does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError
from peftkit.formats.peft.folder import named_tensors
from peftkit.recipe import check, run
from peftkit.run.config import Recipe
from tests.train.children import exit_code, free_port, start

WORDS = ("yes", "no", "perhaps", "of course not", "why do you ask me that again")
ROWS = [
    {"instruction": f"Say {word} {n}.", "output": f"{word} {n}"} for n in range(3) for word in WORDS
]


def recipe(folder: Path, model: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings: dict[str, dict[str, Any]] = {
        "base": {"model": str(model), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 3, "targets": ["q", "v", "down"]},
        "data": {"train": str(data), "eval": str(data), "max_length": 64, "packing": False},
        "train": {
            "max_steps": 5,
            "batch_size": 2,
            "learning_rate": 5e-3,
            "eval_every": 2,
            # rows of many lengths: the processes take different numbers of micro-batches
            "tokens_per_batch": 32,
        },
    }
    return {name: {**section, **sections.get(name, {})} for name, section in settings.items()}


def work(settings: dict[str, Any], resume: bool) -> None:
    torch.manual_seed(0)
    run(from_dict(Recipe, settings, "test"), resume=resume)
    os._exit(0)


def launch(settings: dict[str, Any], resume: bool = False, world: int = 2) -> None:
    port = free_port()
    children = [
        start(
            work,
            settings,
            resume,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(world)
    ]
    assert [exit_code(child) for child in children] == [0] * world


def losses(folder: Path, key: str = "loss") -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry[key] for entry in map(json.loads, lines) if "learning_rate" in entry]


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"base": {"quantize": "nf4"}, "train": {"gradient_checkpointing": True}},
        pytest.param({"method": {"type": "dora"}}, marks=pytest.mark.slow),
        pytest.param({"base": {"quantize": "int8"}}, marks=pytest.mark.slow),
        pytest.param({"train": {"shard": "offload"}}, marks=pytest.mark.slow),
    ],
    ids=["lora", "nf4-recomputed", "dora", "int8", "offload"],
)
def test_two_processes_that_share_a_base_learn_what_one_does(
    sections: dict[str, dict[str, Any]], tmp_path: Path, model_folder: Path
) -> None:
    sharded = {"shard": "base", **sections.get("train", {}), "output_dir": str(tmp_path / "two")}
    launch(recipe(tmp_path, model_folder, **{**sections, "train": sharded}))
    alone = {**sections.get("train", {}), "shard": "none", "gradient_accumulation": 2}
    alone["output_dir"] = str(tmp_path / "one")
    run(from_dict(Recipe, recipe(tmp_path, model_folder, **{**sections, "train": alone}), "test"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    ours, theirs = named_tensors(tmp_path / "two"), named_tensors(tmp_path / "one")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


def test_one_process_goes_on_with_a_checkpoint_of_two(tmp_path: Path, model_folder: Path) -> None:
    train = {"output_dir": str(tmp_path / "run"), "save_every": 2, "max_steps": 4, "shard": "base"}
    launch(recipe(tmp_path, model_folder, train=train))
    after = {**train, "shard": "none", "max_steps": 6}
    settings = from_dict(Recipe, recipe(tmp_path, model_folder, train=after), "test")
    (tmp_path / "run" / "adapter_model.safetensors").unlink()
    run(settings, resume=True, allow_changes=["train", "num_processes", "rows"])
    assert len(losses(tmp_path / "run")) == 6


def test_one_process_cannot_share_a_base(tmp_path: Path) -> None:
    train = {"shard": "base", "output_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="There is one process"):
        run(from_dict(Recipe, recipe(tmp_path, Path("nowhere"), train=train), "test"))
    assert not (tmp_path / "run").exists()


def test_a_sharded_recipe_is_checked_on_one_process(tmp_path: Path, model_folder: Path) -> None:
    settings = recipe(tmp_path, model_folder, train={"shard": "base"})
    check(from_dict(Recipe, settings, "test"))
