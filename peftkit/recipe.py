"""A recipe and its run: the whole story of training an adapter, top to bottom."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from peftkit import config
from peftkit.adapter import Adapter, attach
from peftkit.base import Base, BaseConfig, load_base
from peftkit.config import Config
from peftkit.data.load import DataConfig
from peftkit.data.pack import Row
from peftkit.events import Listener, Notice, Saved, Stage, Table, ignore
from peftkit.files import write_text
from peftkit.formats.card import Card, adapter_usage, write_card
from peftkit.formats.peft import AdapterFolder, Provenance, save_adapter
from peftkit.methods.lora import LoRA
from peftkit.methods.table import AnyMethod
from peftkit.tasks.causal_lm import CausalLM
from peftkit.train.loop import Result, TrainConfig, fit, prepare_output

RECIPE = "recipe.yaml"


class Recipe(Config):
    """Everything that `peftkit train` needs to know."""

    task: Literal["causal_lm"] = "causal_lm"
    """What the model is trained to do."""
    base: BaseConfig
    """The frozen model."""
    method: AnyMethod = LoRA()
    """What is trained beside it."""
    data: DataConfig
    """Rows to learn from."""
    train: TrainConfig = TrainConfig()
    """How to learn."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The rows of a recipe, encoded, packed where asked."""

    task: CausalLM
    train: Sequence[Row]
    eval: Sequence[Row]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: A YAML file.
        overrides: "section.key=value" each; they go through the same validation.

    Raises:
        ConfigError: Every error at once, each with its file and line.
    """
    return config.load(Recipe, Path(path), overrides)


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    on_event: Listener = ignore,
) -> Result:
    """Train a recipe's adapter and save it to `train.output_dir`.

    Args:
        recipe: What to do.
        resume: Continue from the newest valid checkpoint of the output folder.
        overwrite: Start again in a folder that holds an adapter already.
        allow_changes: Dotted keys in which a resumed run may differ from the one it continues.
        on_event: Receives the events of peftkit.events as they happen.

    Raises:
        PeftkitError: What was asked, what was found, what to do.
    """
    folder = Path(recipe.train.output_dir)
    prepare_output(folder, resume=resume, overwrite=overwrite)
    base, adapter, splits = prepare(recipe, on_event=on_event)
    write_text(config.dump_yaml(recipe), folder / RECIPE)
    provenance = provenance_of(recipe, base, splits.task)
    result = fit(
        base.model,
        splits.task,
        splits.train,
        splits.eval,
        recipe.train,
        weights=AdapterFolder(adapter, provenance),
        identity=identity_of(recipe, base, splits),
        resume=resume,
        allow_changes=allow_changes,
        on_event=on_event,
    )
    save_adapter(adapter, folder, provenance)
    write_card(_card(recipe, base, adapter, splits, result), folder)
    on_event(Saved("adapter", folder))
    return result


def prepare(recipe: Recipe, *, on_event: Listener = ignore) -> tuple[Base, Adapter, Splits]:
    """Do everything that comes before the first step: base, adapter, rows."""
    base = load_base(
        recipe.base.model,
        revision=recipe.base.revision,
        dtype=recipe.base.dtype,
        quantize=recipe.base.quantize,
        double_quant=recipe.base.double_quant,
        on_event=on_event,
    )
    on_event(base.audit.table())
    adapter = attach(base.model, recipe.method, seed=recipe.train.seed)
    on_event(_adapter_table(adapter))
    on_event(Stage("Reading the data"))
    splits = _read_data(recipe, base, on_event)
    return base, adapter, splits


def check(recipe: Recipe, *, num_rows: int = 2, on_event: Listener = ignore) -> None:
    """Check all that can be checked without training, and show the first rows as the loss sees them.

    Raises:
        PeftkitError: The first thing that would have stopped the run.
    """
    base, _, splits = prepare(recipe, on_event=on_event)
    for row in splits.train[:num_rows]:
        on_event(
            Table(
                f"{row.source}: learnt tokens are marked",
                ("learnt", "text"),
                tuple(splits.task.spans(row)),
            )
        )
    steps = recipe.train.num_steps(len(splits.train))
    on_event(Notice(f"The recipe is valid: {len(splits.train)} rows, {steps} optimizer steps."))
