"""What the promises are tried on: a recipe of a few steps, and a trained adapter's folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.config import schema
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe
from tests.helpers.command_line import peftkit, turn
from tests.helpers.folders import write_rows

__all__ = ["peftkit"]  # a fixture of the command line's tests

ROWS = [turn(f"what is {n}?", f"the {word} {n}") for n in range(3) for word in ("fox", "dog")]


@pytest.fixture
def recipe_file(tmp_path: Path, model_folder: Path) -> Path:
    """A recipe of six steps that saves after each, with the data it names."""
    write_rows(tmp_path / "train.jsonl", ROWS)
    settings = {
        "base": {"model": str(model_folder), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 2, "alpha": 4, "targets": ["q", "v"], "dropout": 0.1},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_length": 64, "packing": False},
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "batch_size": 1,
            "gradient_accumulation": 2,
            "learning_rate": 0.05,
            "save_every": 1,
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture
def asked(recipe_file: Path) -> Recipe:
    return schema.load(Recipe, recipe_file, ())


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """An adapter folder as a run leaves it, of random numbers."""
    base = load_base(str(model_folder), dtype="fp32")
    adapter = attach(base.model, LoRA(rank=2, alpha=4, targets=("q", "v")))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.uniform_(-0.1, 0.1)
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    loading = {"dtype": "fp32", "quantize": "none", "double_quant": True}
    origin = Provenance(base.name, fingerprint=base.fingerprint, loading=loading)
    return save_adapter(adapter, folder, origin)


@pytest.fixture
def saved(tmp_path: Path, saved_once: Path) -> Path:
    """A copy to do harm to."""
    return shutil.copytree(saved_once, tmp_path / "adapter")
