"""A recipe and its run: the whole story of training an adapter, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peftkit import config
from peftkit.adapter import Adapter, attach
from peftkit.base import Base, BaseConfig, load_base
from peftkit.config import Config
from peftkit.data.load import DataConfig
from peftkit.data.pack import Row
from peftkit.events import Listener, Notice, Saved, Table, ignore
from peftkit.files import write_text
from peftkit.formats.card import CARD, Card, adapter_usage, write_card
from peftkit.formats.peft import AdapterFolder, Provenance, save_adapter
from peftkit.methods.lora import LoRA
from peftkit.methods.table import AnyMethod
from peftkit.tasks.causal_lm import CausalLM
from peftkit.train.checkpoint import prepare_output
from peftkit.train.config import TrainConfig
from peftkit.train.loop import fit
from peftkit.train.metrics import require_trackers
from peftkit.train.run import Result
from peftkit.train.signals import Interrupted, stop_requests, stopping_at_once

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
class Prepared:
    """All that comes before the first step: the adapter on its base, and the encoded rows."""

    base: Base
    adapter: Adapter
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
        overwrite: Start again in a folder that holds a run already.
        allow_changes: Dotted keys in which a resumed run may differ from the one it continues.
        on_event: Receives the events of peftkit.events as they happen.

    Raises:
        PeftkitError: What was asked, what was found, what to do.
        Interrupted: SIGINT or SIGTERM came; what was reached is saved.
    """
    folder = recipe.train.output_dir
    prepare_output(folder, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
    with stopping_at_once("stopped before the first step; what was there is as it was."):
        ready = prepare(recipe, on_event=on_event)
    provenance = _provenance(recipe, ready)
    result = fit(
        ready.base.model,
        ready.task,
        ready.train,
        ready.eval,
        recipe.train,
        weights=AdapterFolder(ready.adapter, provenance),
        identity={
            "base": {**recipe.base.model_dump(mode="json"), "fingerprint": ready.base.fingerprint},
            "method": recipe.method.model_dump(mode="json"),
            "data": recipe.data.model_dump(mode="json"),
        },
        resume=resume,
        overwrite=overwrite,
        allow_changes=allow_changes,
        on_event=on_event,
    )
    if result.is_main:
        with stop_requests() as stop:
            save_adapter(ready.adapter, folder, provenance)
            _write_papers(recipe, ready, result, on_event)
            on_event(Saved("adapter", folder))
        if stop.signum:
            raise Interrupted(stop.signum, f"all is done; the adapter is in {folder}.")
    return result


def prepare(recipe: Recipe, *, on_event: Listener = ignore) -> Prepared:
    """Do everything that comes before the first step.

    Raises:
        PeftkitError: The base, a target or the data is not as the recipe says.
    """
    require_trackers(recipe.train.log_to)
    base = load_base(
        recipe.base.model,
        revision=recipe.base.revision,
        dtype=recipe.base.dtype,
        quantize=recipe.base.quantize,
        double_quant=recipe.base.double_quant,
        task=recipe.task,
        on_event=on_event,
    )
    on_event(base.audit.table())
    adapter = attach(base.model, recipe.method, seed=recipe.train.seed)
    on_event(_adapter_table(adapter))
    task = CausalLM(base.model, base.tokenizer, recipe.data, on_event=on_event)
    train = task.load(recipe.data.train)
    evaluation = task.load(recipe.data.eval) if recipe.data.eval else []
    return Prepared(base, adapter, task, train, evaluation)


def check(recipe: Recipe, *, num_rows: int = 2, on_event: Listener = ignore) -> None:
    """Check all but the training, and show the first rows as the loss sees them.

    Raises:
        PeftkitError: The first thing that would have stopped the run.
    """
    ready = prepare(recipe, on_event=on_event)
    for row in ready.train[:num_rows]:
        pieces = tuple(ready.task.spans(row))
        on_event(Table(f"{row.source}, as the loss sees it", ("", "text"), pieces))
    num_steps = recipe.train.num_steps(len(ready.train))
    on_event(Notice(f"All is well: {len(ready.train)} rows, {num_steps} optimizer steps."))


def _write_papers(recipe: Recipe, ready: Prepared, result: Result, on_event: Listener) -> None:
    """Write recipe.yaml and the model card; no failure of these costs the adapter, saved before."""
    folder = recipe.train.output_dir
    writers: dict[str, Callable[[], None]] = {
        RECIPE: lambda: write_text(config.dump_yaml(recipe), folder / RECIPE),
        CARD: lambda: write_card(_card(recipe, ready, result), folder),
    }
    for name, write in writers.items():
        try:
            write()
        except Exception as error:  # whatever it is
            on_event(Notice(f"{name} was not written; the adapter is complete without. {error}"))


def _provenance(recipe: Recipe, ready: Prepared) -> Provenance:
    return Provenance(
        base=ready.base.name,
        hub_id=ready.base.hub_id,
        revision=ready.base.revision,
        fingerprint=ready.base.fingerprint,
        loading=recipe.base.model_dump(mode="json", exclude={"model", "revision"}),
        prompt_style=ready.task.style,
    )


def _adapter_table(adapter: Adapter) -> Table:
    """Return one row per kind of adapted layer: its ending, how many, trained values."""
    kinds: dict[str, tuple[int, int]] = {}
    for path, module in adapter.modules.items():
        roles = ", ".join(module.site.roles) or "-"
        kind = f"{roles} | {path.rpartition('.')[2]}"
        number, values = kinds.get(kind, (0, 0))
        own = sum(p.numel() for p in module.parameters() if p.requires_grad)
        kinds[kind] = (number + 1, values + own)
    rows = [(*kind.split(" | "), str(n), f"{values:,}") for kind, (n, values) in kinds.items()]
    total = ("all", "", str(len(adapter.modules)), f"{adapter.num_trainable:,}")
    columns = ("role", "module", "layers", "trained values")
    return Table(f"Adapter: {adapter.method.type}", columns, (*rows, total))


def _card(recipe: Recipe, ready: Prepared, result: Result) -> Card:
    base, num_base = ready.base, ready.base.audit.num_parameters
    share = ready.adapter.num_trainable / num_base
    facts = {
        "base": base.name + (f" @ {base.revision}" if base.revision else ""),
        "base weights": base.fingerprint,
        "method": recipe.method.type,
        "trained values": f"{ready.adapter.num_trainable:,} ({share:.2%} of the base)",
        "data": f"{recipe.data.train}, {len(ready.train):,} rows after packing and filtering",
        "steps": str(result.step),
    }
    return Card(
        title=f"{recipe.method.type} adapter for {base.name}",
        base=base.name,
        facts=facts,
        metrics=result.metrics,
        recipe=config.dump_yaml(recipe),
        usage=adapter_usage(base.name, str(recipe.train.output_dir)),
    )
