"""Runs of speech: two processes train what one does, and resuming is exact."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from peftkit.events import StepDone
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.finished import WEIGHTS, Finished, finished, sections
from tests.helpers.speech import hears_frames, saved, whisper, write_speech_rows

TASKS: dict[str, dict[str, Any]] = {
    "transcription": {"language": "english"},
    "ctc": {"vocabulary": "data"},
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


def trained(folder: Path, name: str, out: str, **train: Any) -> Finished:
    told = sections(folder, folder / name, str(folder / "rows.jsonl"), name, **TASKS[name])
    told["method"] |= {"rank": 2, "targets": ["q", "v"]}
    del told["data"]["max_length"]
    settings = {"batch_size": 2, "save_every": 1, "learning_rate": 0.01, **train}
    return finished(told, train={"output_dir": str(folder / out / name), **settings})


def learn(folder: str, out: str, accumulation: int) -> None:
    """Run both tasks for two steps, and write the losses."""
    for name in TASKS:
        done = trained(Path(folder), name, out, max_steps=2, gradient_accumulation=accumulation)
        if os.environ.get("RANK", "0") == "0":
            losses = [step.loss for step in done.of_kind(StepDone)]
            (done.folder / "losses.json").write_text(json.dumps(losses))


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    write_base(tmp_path)
    children = start_ranks(learn, str(tmp_path), "two", 1)
    learn(str(tmp_path), "one", 2)
    assert [exit_code(each, 240) for each in children] == [0, 0]
    for name in TASKS:
        one, two = (
            json.loads((tmp_path / o / name / "losses.json").read_text()) for o in ("one", "two")
        )
        assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("name", TASKS)
def test_resuming_is_bit_equal(name, tmp_path):
    write_base(tmp_path)
    whole = trained(tmp_path, name, "whole", max_steps=4)
    parts = whole.resumed(tmp_path / "parts", "step-4")
    assert (parts.folder / WEIGHTS).read_bytes() == (whole.folder / WEIGHTS).read_bytes()
