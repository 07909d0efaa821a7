"""Runs of speech: two processes learn what one does, and resuming is exact."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peftkit.config.schema import from_dict
from peftkit.events import Event, StepDone
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.speech import hears_frames, saved, whisper, write_speech_rows

TASKS: dict[str, dict[str, Any]] = {
    "transcription": {"type": "transcription", "language": "english"},
    "ctc": {"type": "ctc", "vocabulary": "data"},
}
TONES = [[440.0, 880.0], [300.0], [700.0, 500.0, 600.0], [900.0]]
ROWS = [
    {"audio": 3 * one, "text": text}
    for one, text in zip(TONES, ("one two", "a", "good", "b"), strict=True)
]


def write_base(folder: Path) -> None:
    """Write the rows and both bases."""
    write_speech_rows(folder, ROWS)
    saved(folder / "transcription", whisper())
    saved(folder / "ctc", hears_frames("Parakeet"))


def asked(name: str, out: str, **train: Any) -> Recipe:
    told = {"output_dir": f"{out}/{name}", "max_steps": 4, "batch_size": 2, "save_every": 1}
    spec = {
        "task": TASKS[name],
        "base": {"model": name, "dtype": "fp32"},
        "method": {"type": "lora", "rank": 2, "targets": ["q", "v"]},
        "data": {"train": "rows.jsonl"},
        "train": {**told, "learning_rate": 0.01, **train},
    }
    return from_dict(Recipe, spec, "the test")


def learn(folder: str, out: str, accumulation: int) -> None:
    """Run both tasks for two steps, and write the losses."""
    os.chdir(folder)
    for name in TASKS:
        losses = list[float]()

        def listen(event: Event, losses: list[float] = losses) -> None:
            if isinstance(event, StepDone):
                losses.append(event.loss)

        settings = asked(name, out, max_steps=2, gradient_accumulation=accumulation)
        run_recipe(settings, on_event=listen)
        if os.environ.get("RANK", "0") == "0":
            Path(out, name, "losses.json").write_text(json.dumps(losses))


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path, monkeypatch):
    write_base(tmp_path)
    children = start_ranks(learn, str(tmp_path), "two", 1)
    monkeypatch.chdir(tmp_path)
    learn(str(tmp_path), "one", 2)
    assert [exit_code(each, 240) for each in children] == [0, 0]
    for name in TASKS:
        one, two = (json.loads(Path(o, name, "losses.json").read_text()) for o in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("name", TASKS)
def test_resuming_is_bit_equal(name, tmp_path, monkeypatch):
    write_base(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_recipe(asked(name, "whole"))

    def end(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(asked(name, "parts"), on_event=end)
    run_recipe(asked(name, "parts"), resume=True)
    whole, parts = (
        load_file(Path(out, name, "adapter_model.safetensors")) for out in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    for key, tensor in whole.items():
        assert torch.equal(parts[key], tensor), key
