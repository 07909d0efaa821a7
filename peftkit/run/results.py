"""What a run leaves in its folder: the adapter, its recipe, its card, and facts for the report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from peftkit.config import schema
from peftkit.data.pack import tokens_of_each
from peftkit.events import Listener, Notice, Saved, Table, ignore
from peftkit.execution.state import Result
from peftkit.files.disk import write_text
from peftkit.formats.card import (
    CARD,
    Card,
    adapter_usage,
    training_card,
    write_card,
)
from peftkit.formats.continued import AdapterFolder
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.peft.targets import refused_by_peft
from peftkit.formats.serving import served_rank
from peftkit.model.modes import evaluating
from peftkit.report.history import FACTS, RunFacts
from peftkit.report.live import BeforeRun
from peftkit.run.config import Recipe
from peftkit.run.prepare import Prepared
from peftkit.train.checkpoints.manifest import versions

RECIPE = "recipe.yaml"
NUM_BARS = 24
MAX_PIECE_CHARS, MAX_PIECES = 4_000, 32


def adapter_folder(recipe: Recipe, ready: Prepared) -> AdapterFolder:
    """Return what a checkpoint holds of the model: an adapter folder."""
    start = ready.continued
    has_tokens = recipe.base.new_tokens or (start and start.has_tokens)
    return AdapterFolder(
        ready.adapter,
        _provenance(recipe, ready),
        base=ready.base if has_tokens else None,
        start=start.start if start and ready.settings.needs_reference else None,
    )


def identity(recipe: Recipe, ready: Prepared) -> dict[str, Any]:
    """Return what a resumed run must have in common with the saved one, as plain JSON."""
    return {
        "base": {
            **recipe.base.model_dump(mode="json", exclude={"store", "placement"}),
            "fingerprint": ready.base.fingerprint,
        },
        "method": recipe.method.model_dump(mode="json"),
        "data": recipe.data.model_dump(mode="json"),
        "task": ready.settings.model_dump(mode="json"),
        **ready.task.identity,
        **({"start": ready.continued.digest} if ready.continued else {}),
    }


def save_result(
    recipe: Recipe, ready: Prepared, result: Result, *, on_event: Listener = ignore
) -> Result:
    """Write the adapter, the recipe and the model card; return the result with its metrics.

    Where several processes have the base together all must call; the main one writes.
    """
    folder = recipe.train.output_dir
    weights = adapter_folder(recipe, ready)
    result = _with_best(recipe, result, weights, on_event)
    if not result.is_main:
        return measured(ready, result, ignore)
    weights.save(folder)
    if told := refused_by_peft(ready.adapter):
        on_event(Notice(told))
    result = measured(ready, result, on_event)
    _write_papers(recipe, ready, result, on_event)
    on_event(Saved("adapter", folder))
    return result


def _with_best(
    recipe: Recipe, result: Result, weights: AdapterFolder, on_event: Listener
) -> Result:
    """Load the best checkpoint's weights, if they are asked for and not those of the last step."""
    best = result.best_step
    if not recipe.train.keep_best or result.best_checkpoint is None or best is None:
        return result
    if best != result.step:
        weights.load(result.best_checkpoint)
        on_event(
            Notice(
                f"The adapter has the weights of step {best}, the best of the eval rows (loss "
                f"{result.metrics['best_eval_loss']:.4g}); those of the last step, {result.step}, "
                f"are in {result.checkpoint}."
            )
        )
    return replace(result, metrics={**result.metrics, "adapter_step": float(best)})


def measured(ready: Prepared, result: Result, on_event: Listener) -> Result:
    """Add what a task is measured by beside a perplexity: it takes no longer than the loss."""
    skip = ready.task.predicts_tokens and not ready.settings.measures_before
    if not ready.eval or skip:
        return result
    if not (found := ready.task.metrics(ready.base.model, ready.eval, on_event=on_event)):
        return result  # a task whose evaluations were made by the run
    on_event(_metrics_table("The eval rows", found))
    measured = {f"eval_{name}": value for name, value in found.items()}
    return replace(result, metrics={**result.metrics, **measured})


def measured_before(ready: Prepared, on_event: Listener) -> dict[str, float]:
    """Measure the eval rows before the first step, for tasks that say so.

    Where several processes have the base together all must call.
    """
    if not ready.settings.measures_before or not ready.eval:
        return {}
    with evaluating(ready.base.model):
        found = ready.task.metrics(ready.base.model, ready.eval, on_event=on_event)
    on_event(_metrics_table("The eval rows before training", found))
    return {f"before_{name}": value for name, value in found.items()}


def _metrics_table(title: str, found: Mapping[str, float]) -> Table:
    rows = tuple((name, f"{value:.4g}") for name, value in found.items())
    return Table(title, ("metric", "value"), rows)


def _write_papers(recipe: Recipe, ready: Prepared, result: Result, on_event: Listener) -> None:
    """Write recipe.yaml and the model card; no failure of these costs the adapter, saved before."""
    folder = recipe.train.output_dir
    writers: dict[str, Callable[[], None]] = {
        RECIPE: lambda: write_text(schema.dump_yaml(recipe), folder / RECIPE),
        CARD: lambda: write_card(_card(recipe, ready, result), folder),
    }
    for name, write in writers.items():
        try:
            write()
        except Exception as error:  # whatever it is
            on_event(Notice(f"{name} was not written; the adapter is complete without. {error}"))


def write_facts(recipe: Recipe, ready: Prepared, before: BeforeRun) -> None:
    """Write run.json: what the report of the run tells besides its figures."""
    row, base = ready.train[0], ready.base
    pieces = [(kind, text[:MAX_PIECE_CHARS]) for kind, text in ready.task.spans(row)]
    facts = RunFacts(
        recipe=recipe.model_dump(mode="json"),
        recipe_yaml=schema.dump_yaml(recipe),
        tables=tuple(before.tables),
        notices=tuple(before.notices),
        lengths={"train": lengths(ready.train), "eval": lengths(ready.eval)},
        row_source=str(getattr(row, "source", "")),
        row=tuple(pieces[:MAX_PIECES]),
        machine={
            "base": base.name,
            "revision": base.revision,
            "fingerprint": base.fingerprint,
            "seed": recipe.train.seed,
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "versions": dict(versions()),
        },
        command=ready.settings.command,
        mergeable=not recipe.method.unmergeable,
    )
    write_text(facts.model_dump_json(indent=2), recipe.train.output_dir / FACTS)


def lengths(rows: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return how many documents have their tokens in spans of equal width, by their lower edges."""
    known: Tensor | None = getattr(rows, "document_lengths", None)  # several may share a row
    numbers = tokens_of_each(rows) if known is None else known
    if not len(numbers):
        return ()
    low, high = int(numbers.min()), int(numbers.max())
    width = max(1, -(-(high - low + 1) // NUM_BARS))
    counts = ((numbers - low) // width).bincount().tolist()
    return tuple((low + width * n, count) for n, count in enumerate(counts))


def _provenance(recipe: Recipe, ready: Prepared) -> Provenance:
    loading = recipe.base.model_dump(
        mode="json", exclude={"model", "revision", "new_tokens", "store", "placement"}
    )
    if ready.base.stored:
        loading["stored"] = ready.base.stored
    if recipe.base.rope_scaling:  # all of it, with what the base's config said
        loading["rope_scaling"] = dict(ready.base.model.config.get_text_config().rope_parameters)
    return Provenance(
        base=ready.base.name,
        hub_id=ready.base.hub_id,
        revision=ready.base.revision,
        fingerprint=ready.base.fingerprint,
        loading=loading,
        prompt_style=ready.task.style,
        task_type=ready.settings.task_type,
        task=ready.settings.saved(),
        plan=ready.plan.as_dict(),
    )


def _card(recipe: Recipe, ready: Prepared, result: Result) -> Card:
    data = f"{recipe.data.train_name}, {len(ready.train):,} rows after packing and filtering"
    usage = adapter_usage(
        ready.base.hub_id or ready.base.name,
        str(recipe.train.output_dir),
        rank=served_rank(ready.adapter.method),
        command=ready.settings.command,
        purpose=ready.settings.purpose,
    )
    return training_card(
        ready.base,
        ready.adapter,
        data=data,
        steps=result.step,
        metrics=result.metrics,
        recipe=schema.dump_yaml(recipe),
        usage=usage,
    )
