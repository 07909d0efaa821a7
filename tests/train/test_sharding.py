"""A base that is spread over processes learns what one process does."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.base import sharding
from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError
from peftkit.formats.peft.load import named_tensors
from peftkit.quant.quantize import quantize_model
from peftkit.recipe import Recipe
from peftkit.run import check, run
from tests.helpers.sharded import logged_losses, ragged_recipe, run_alone, run_ranks


def settings_of(folder: Path, model: Path) -> dict[str, Any]:
    train = {"max_steps": 4, "save_every": 2, "gradient_checkpointing": True}
    return ragged_recipe(folder, model, base={"quantize": "nf4"}, train=train)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run on two processes that share a base in 4 bits and recompute its blocks."""
    directory = tmp_path_factory.mktemp("sharded")
    assert run_ranks(directory, {"two": settings_of(directory, model_folder)}) == {}
    return directory


def test_packed_weights_that_torch_cannot_shard_are_refused(llama, monkeypatch):
    monkeypatch.setattr(sharding, "SHARDS_PACKED", False)
    quantize_model(llama, "nf4", compute_dtype=torch.float32)
    with pytest.raises(ConfigError, match="weights are packed"):
        sharding.shard_base(llama, torch.device("cpu"))


def test_two_ranks_learn_what_one_does(folder, model_folder, tmp_path):
    run_alone(settings_of(folder, model_folder), tmp_path)
    assert logged_losses(folder / "two") == pytest.approx(logged_losses(tmp_path), rel=1e-5)
    ours, theirs = named_tensors(folder / "two"), named_tensors(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


def test_one_rank_resumes_two(folder, model_folder, tmp_path):
    out = shutil.copytree(folder / "two", tmp_path / "run")
    settings = settings_of(folder, model_folder)
    settings["train"] |= {"output_dir": str(out), "shard": "none", "max_steps": 6}
    again = from_dict(Recipe, settings, "test")
    run(again, resume=True, allow_changes=["train", "num_processes", "rows"])
    assert len(logged_losses(out)) == 6


def test_one_process_cannot_share_a_base(tmp_path):
    train = {"shard": "base", "output_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="There is one process"):
        run(from_dict(Recipe, ragged_recipe(tmp_path, Path("nowhere"), train=train), "test"))
    assert not (tmp_path / "run").exists()


def test_a_sharded_recipe_is_checked_on_one_process(tmp_path, model_folder):
    settings = ragged_recipe(tmp_path, model_folder, train={"shard": "base"})
    check(from_dict(Recipe, settings, "test"))
