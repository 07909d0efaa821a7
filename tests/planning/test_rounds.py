"""Members of a sweep are trained at once as far as memory holds them, else in rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peftkit.config.schema import from_dict
from peftkit.execution.environment import Environment
from peftkit.planning.memory import MemoryEstimator
from peftkit.planning.resolve import split
from peftkit.run.config import Recipe
from tests.planning.test_step_estimator import llama

GB = 10**9


def member(rank: int, **train: Any) -> Recipe:
    given = {
        "base": {"model": "x", "quantize": "nf4"},
        "method": {"type": "lora", "rank": rank},
        "data": {"train": "", "max_length": 64},
        "train": {"batch_size": 2, **train},
    }
    return from_dict(Recipe, given, "test")


def machine(memory: int) -> Environment:
    return Environment("cuda", memory)


@pytest.fixture(scope="module")
def costs() -> MemoryEstimator:
    return MemoryEstimator(member(8, group_layers=False), llama(), machine(GB))


def test_members_are_split_where_memory_ends(costs: MemoryEstimator) -> None:
    recipes, own = [member(8)] * 5, costs.member_bytes("adamw")
    shared = costs.pass_bytes(10)
    assert split(recipes, llama(), machine(100 * (shared + own))) == [range(5)]
    assert split(recipes, llama(), machine(shared + 5 * own)) == [range(5)]
    halves = [range(2), range(2, 4), range(4, 5)]
    assert split(recipes, llama(), machine(shared + 3 * own - 1)) == halves


@pytest.mark.slow
def test_larger_members_take_more_room(costs: MemoryEstimator) -> None:
    own = costs.member_bytes("adamw")
    assert costs.member_bytes("adamw_8bit") < own
    large = MemoryEstimator(member(16, group_layers=False), llama(), machine(GB))
    assert large.member_bytes("adamw") == 2 * own
    shared = large.pass_bytes(6)
    recipes = [member(8), member(16), member(8)]
    assert split(recipes, llama(), machine(shared + 3 * own)) == [range(2), range(2, 3)]


@pytest.mark.slow
def test_sweep_in_rounds_trains_every_member(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peftkit.planning import resolve
    from peftkit.sweeps.members import grid
    from peftkit.sweeps.sweep import sweep

    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "one two three four"}\n' * 4, encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: {{model: {model_folder}}}\n"
        "method: {type: lora, rank: 2, targets: [q, v]}\n"
        f"data: {{train: {data}, max_length: 32}}\n"
        "train: {max_steps: 2, compile: false}\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(resolve, "free_now", lambda *_: machine(1000))
    members = grid(recipe, ["train.learning_rate=1e-3,1e-2"], out=tmp_path / "out")
    told: list[Any] = []
    sweep(members, out=tmp_path / "out", on_event=told.append)
    assert any("2 rounds" in str(event) for event in told)
    for one in members:
        assert (one.recipe.train.output_dir / "adapter_model.safetensors").is_file()
