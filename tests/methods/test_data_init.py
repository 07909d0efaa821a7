"""Starts that a recipe asks for: made before the adapter is attached, and not again on a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.config.schema import from_dict
from peftkit.errors import ConfigError
from peftkit.events import Event, StepDone
from peftkit.formats.peft.load import read_adapter
from peftkit.recipe import Recipe
from peftkit.run import prepare
from peftkit.run import run as run_recipe
from tests.helpers.folders import write_rows

ROWS = [
    {"instruction": f"Say {word} {number}.", "output": f"{word} {number}"}
    for number in range(4)
    for word in ("yes", "no", "perhaps")
]


class Stopped(Exception):
    """Stands for whatever ends a process."""


def stop_after_step_3(event: Event) -> None:
    if isinstance(event, StepDone) and event.step == 4:
        raise Stopped


def parse(folder: Path, model: Path, method: dict[str, Any], **base: str) -> Recipe:
    train = folder / "train.jsonl"
    write_rows(train, ROWS)
    settings = {
        "base": {"model": str(model), "dtype": "fp32", **base},
        "method": {"type": "lora", "rank": 4, "alpha": 8, "targets": ["q", "down"], **method},
        "data": {"train": str(train), "max_length": 64},
        "train": {
            "output_dir": str(folder / "run"),
            "max_steps": 5,
            "batch_size": 2,
            "learning_rate": 5e-3,
            "save_every": 1,
        },
    }
    return from_dict(Recipe, settings, "test")


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize(
    ("method", "base"),
    [({"init": "eva", "type": "dora"}, {}), ({"init": "loftq"}, {"quantize": "nf4"})],
    ids=str,
)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    method, base, tmp_path, model_folder, monkeypatch
):
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    recipes = []
    for folder in folders:
        folder.mkdir()
        recipes.append(parse(folder, model_folder, method, **base))
    losses: list[float] = []
    run_recipe(recipes[0], on_event=lambda e: losses.append(getattr(e, "loss", float("nan"))))
    with pytest.raises(Stopped):
        run_recipe(recipes[1], on_event=stop_after_step_3)

    def made_again(*args: object, **kwargs: object) -> None:
        raise AssertionError("a resumed run has its start already")

    monkeypatch.setattr("peftkit.methods.data_init.init_from_rows", made_again)
    monkeypatch.setattr("peftkit.methods.data_init.loftq_starts", made_again)
    run_recipe(recipes[1], resume=True)
    whole, stopped = (folder / "run" / "adapter_model.safetensors" for folder in folders)
    assert whole.read_bytes() == stopped.read_bytes()
    saved = read_adapter(folders[1] / "run").method
    assert saved == read_adapter(folders[0] / "run").method
    if method["init"] == "eva":
        assert saved.rank_pattern  # type: ignore[attr-defined]


def test_eva_reads_training_rows_in_seeded_order(tmp_path, model_folder):
    recipes = parse(tmp_path, model_folder, {"init": "eva"})
    first = prepare(recipes).adapter.state()
    again = prepare(recipes).adapter.state()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    b = [tensor for name, tensor in first.items() if "lora_B" in name]
    assert b
    assert not any(tensor.any() for tensor in b)
    record = prepare(
        recipes.model_copy(update={"data": recipes.data.model_copy(update={"eval": 0.4})})
    )
    left = [ROWS[int(row.source.rpartition(":")[2]) - 1] for row in record.train]
    assert len(left) < len(ROWS)
    write_rows(tmp_path / "train.jsonl", left)  # held-out rows are not read
    alone = prepare(recipes).adapter.state()
    assert all(torch.equal(tensor, alone[n]) for n, tensor in record.adapter.state().items())


def test_loftq_without_quantising_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(
        ConfigError, match=r"method\.init: loftq compensates the quantisation error"
    ):
        parse(tmp_path, Path("nowhere"), {"init": "loftq"})
