"""Two processes on gloo distil what one does, and ask the teacher in each step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from peftkit.adapter import attach
from peftkit.events import Event, StepDone
from peftkit.methods.lora import LoRA
from peftkit.train.config import TrainConfig
from peftkit.train.loop import fit
from tests.families import FAMILIES, tiny_tokenizer
from tests.tasks.distill.cases import settings, task_on, write_rows
from tests.train.children import exit_code, free_port, start


def learn(folder: str, accumulation: int) -> list[tuple[float, dict[str, float]]]:
    import torch

    torch.manual_seed(0)
    model = FAMILIES["llama"]().eval()
    adapter = attach(model, LoRA(rank=2, targets=("q", "v")))
    file = str(Path(folder).parent / "rows.jsonl")
    task, rows = task_on(model, tiny_tokenizer(), settings(Path(folder)), file)
    task.set_reference(adapter.disabled, "the tiny base")
    told: list[tuple[float, dict[str, float]]] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            told.append((event.loss, dict(event.figures)))

    config = TrainConfig(
        output_dir=Path(folder),
        max_steps=3,
        batch_size=2,
        gradient_accumulation=accumulation,
        learning_rate=0.01,
        save_every=None,
    )
    fit(model, task, rows, config=config, on_event=listen)
    assert ("before the first step" in task.paths["teacher"]) == (accumulation == 2)
    return told


def child(folder: str) -> None:
    told = learn(folder, 1)
    if os.environ["RANK"] == "0":
        Path(folder, "told.json").write_text(json.dumps(told))


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    write_rows(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    port: Any = free_port()
    children = [
        start(
            child,
            str(tmp_path / "two"),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    one = learn(str(tmp_path / "one"), 2)
    assert [exit_code(each) for each in children] == [0, 0]
    two = json.loads((tmp_path / "two" / "told.json").read_text())
    for (loss, figures), (other, others) in zip(one, two, strict=True):
        assert other == pytest.approx(loss, rel=1e-3)
        assert others == pytest.approx(figures, abs=0.05)
