"""Two processes answer their own prompts, and learn what one does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from peftkit import recipe
from peftkit.config.schema import from_dict
from peftkit.events import Event, StepDone
from peftkit.run.config import Recipe
from tests.train.children import exit_code, free_port, start


def learn(folder: str, model: str, out: str, batch_size: int) -> None:
    os.chdir(folder)
    told: list[tuple[float, dict[str, float]]] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            told.append((event.loss, dict(event.figures)))

    data = {
        "task": {
            "type": "grpo",
            "rewards": [{"use": "regex", "pattern": "[aeiou].*[aeiou]"}],
            "answers": 6,
            "max_new_tokens": 8,
            "mask_cut": False,
        },
        "base": {"model": model, "dtype": "fp32"},
        "method": {"type": "lora", "rank": 2},
        "data": {"train": "p.jsonl", "max_length": 64},
        "train": {
            "output_dir": out,
            "max_steps": 2,
            "batch_size": batch_size,
            "learning_rate": 0.01,
            "save_every": None,
        },
    }
    recipe.run(from_dict(Recipe, data, "the test"), on_event=listen)
    if os.environ.get("RANK", "0") == "0":
        Path(out, "told.json").write_text(json.dumps(told))


def test_two_processes_learn_what_one_does(tmp_path: Path, model_folder: Path) -> None:
    rows = [{"prompt": f"the quick brown {n}"} for n in range(6)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here, model, port = str(tmp_path), str(model_folder), free_port()
    world: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    children = [
        start(learn, here, model, "two", 2, RANK=str(rank), LOCAL_RANK=str(rank), **world)
        for rank in range(2)
    ]
    alone = start(learn, here, model, "one", 4)
    assert [exit_code(each, 240) for each in (*children, alone)] == [0, 0, 0]
    one, two = (json.loads((tmp_path / name / "told.json").read_text()) for name in ("one", "two"))
    for (loss, figures), (other, others) in zip(one, two, strict=True):
        assert other == pytest.approx(loss, abs=1e-4)
        # of each process of its own answers, and of each group of its own spread
        for name in ("rollout_seconds", "reward_std"):
            del figures[name], others[name]
        assert others["reward"] == pytest.approx(figures["reward"], abs=1e-6)
        assert others == pytest.approx(figures, rel=1e-2, abs=1e-3)
