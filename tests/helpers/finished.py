"""A run that several tests read, and what its events told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from peftkit.config import schema
from peftkit.events import Event, Stage
from peftkit.recipe import Recipe
from peftkit.run import run
from tests.helpers.folders import write_rows

WEIGHTS = "adapter_model.safetensors"
Kind = TypeVar("Kind", bound=Event)
Sections = dict[str, dict[str, Any]]


def sections(folder: Path, base: Path, file: str, task: str, **settings: Any) -> Sections:
    """Return a recipe of a LoRA over the rows of a file, which writes into `folder`/run."""
    return {
        "task": {"type": task, **settings},
        "base": {"model": str(base), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 4},
        "data": {"train": file, "max_length": 64},
        "train": {"output_dir": str(folder / "run"), "save_every": None},
    }


def supervised(folder: Path, base: Path, rows: Any, eval_rows: Any, **train: Any) -> Sections:
    """Write rows, and return a recipe that trains on some and evaluates on others."""
    told = sections(folder, base, write_rows(folder / "train.jsonl", rows), "causal_lm")
    told["data"] |= {"eval": write_rows(folder / "eval.jsonl", eval_rows), "max_length": 128}
    return {**told, "train": train}


@dataclass
class Finished:
    """What a run was told, what it said, and where it lies; do not write into its folder."""

    told: Sections
    folder: Path
    events: list[Event]
    metrics: dict[str, float]

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    def stages(self, text: str) -> list[str]:
        return [event.text for event in self.of_kind(Stage) if event.text.startswith(text)]

    def resumed(self, to: Path, *last: str) -> Finished:
        """Go on with a copy of it as it was before its last checkpoints."""
        shutil.copytree(self.folder, to)
        for name in last:
            shutil.rmtree(to / "checkpoints" / name)
        (to / WEIGHTS).unlink()
        return finished(self.told, train={"output_dir": str(to)}, resume=True)


@contextmanager
def replaced(file: Path, text: str) -> Iterator[None]:
    """Have a file hold another text."""
    before = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(before)


def merged(told: Sections, changes: Sections) -> Sections:
    return {name: {**section, **changes.get(name, {})} for name, section in told.items()}


def recipe(told: Sections, **changes: dict[str, Any]) -> Recipe:
    """Return the recipe of sections, some of them changed."""
    return schema.from_dict(Recipe, merged(told, changes), "the test")


def finished(
    told: Sections, *, resume: bool = False, overwrite: bool = False, **changes: Any
) -> Finished:
    """Run a recipe to its end."""
    events: list[Event] = []
    made = recipe(told, **changes)
    result = run(made, resume=resume, overwrite=overwrite, on_event=events.append)
    return Finished(merged(told, changes), made.train.output_dir, events, dict(result.metrics))
