"""The record of a run, and the files that are written from it.

| file | method of `RunRecord` |
|---|---|
| `checkpoints/` | `adapter_folder`; `identity`, which a resumed run must match |
| `run.json`, when training starts | `facts`, which the report shows with `metrics.jsonl` |
| `peftkit.json`, with the adapter | `provenance` |
| `recipe.yaml`, `README.md`, at the end | `recipe`, `card` |
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from peftkit.adapter import Adapter
from peftkit.base.load import Base
from peftkit.config import schema
from peftkit.data.rows.lazy import tokens_of_each
from peftkit.events import (
    Event,
    Listener,
    Notice,
    RunStarted,
    Saved,
    Stage,
    Table,
    ignore,
    to_all,
)
from peftkit.execution.plan import ExecutionPlan, compute_dtype
from peftkit.execution.state import Result
from peftkit.figures import dtype_name, loss_name, metric, metric_name
from peftkit.files.disk import sha256_of, write_text
from peftkit.formats.folders import CARD, OVERWRITTEN, PROOF, TENSORS
from peftkit.formats.peft.folder import AdapterFolder
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.peft.targets import refused_by_peft
from peftkit.forward.loss import perplexity
from peftkit.model.blocks import is_sharded
from peftkit.model.modes import evaluating
from peftkit.recipe import Recipe
from peftkit.tasks.base import Task
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.run_hooks import hooks_of
from peftkit.train.checkpoint_files import versions

if TYPE_CHECKING:
    from peftkit.formats.open_adapter import Continued

FACTS, RECIPE = "run.json", "recipe.yaml"
NUM_BARS = 24
MAX_SPAN_CHARS, MAX_SPANS = 4_000, 32


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that is ready to train, as recorded in the files of its folder.

    Attributes:
        recipe: The recipe, with the defaults that depend on the task and the base.
        plan: The execution plan, before rows are measured.
        task: The task on this base, with the adapter.
        settings: The task's section, with the labels of the data.
        train, eval: The encoded rows.
        continued: The adapter that this run continues, if any.
        events: Events of the preparation; run.json has the tables and notices.
    """

    recipe: Recipe
    plan: ExecutionPlan
    base: Base
    adapter: Adapter
    task: Task
    settings: TaskConfig
    train: Sequence[Any]
    eval: Sequence[Any]
    continued: Continued | None = None
    events: Sequence[Event] = ()

    @property
    def folder(self) -> Path:
        """The folder that the run writes to."""
        return self.recipe.train.output_dir

    def identity(self) -> dict[str, object]:
        """Return the settings and inputs that a resumed run must match, as plain JSON."""
        recipe = self.recipe
        return {
            "base": {
                **recipe.base.model_dump(mode="json", exclude={"store", "placement"}),
                "fingerprint": self.base.fingerprint,
                "computes_in": dtype_name(compute_dtype(self.base.model)),
            },
            "method": recipe.method.model_dump(mode="json"),
            "data": recipe.data.model_dump(mode="json"),
            "task": self.settings.model_dump(mode="json"),
            **hooks_of(self.task).identity,
            **({"start": self.continued.digest} if self.continued else {}),
        }

    def adapter_folder(self) -> AdapterFolder:
        """Return the writer of the adapter files in checkpoints."""
        start = self.continued
        has_tokens = self.recipe.base.new_tokens or (start and start.has_tokens)
        return AdapterFolder(
            self.adapter,
            self.provenance(),
            base=self.base if has_tokens else None,
            start=start.start if start and self.settings.needs_reference else None,
        )

    def provenance(self) -> Provenance:
        """Return the base, the task and the execution plan, for peftkit.json."""
        config = self.recipe.base
        loading = config.model_dump(
            mode="json", exclude={"model", "revision", "new_tokens", "store", "placement"}
        )
        if self.base.stored:
            loading["stored"] = self.base.stored
        if self.recipe.train.quantize_for != "none":
            loading["quantize_for"] = self.recipe.train.quantize_for
        if config.rope_scaling:  # complete, with parameters of the base's config
            loading["rope_scaling"] = dict(self.base.model.config.get_text_config().rope_parameters)
        return Provenance(
            base=self.base.name,
            hub_id=self.base.hub_id,
            revision=self.base.revision,
            fingerprint=self.base.fingerprint,
            trunk=self.base.trunk or None,
            loading=loading,
            prompt_style=self.task.rows.style,
            task_type=self.settings.task_type,
            task=self.settings.saved(),
            plan=self.plan.as_dict(),
        )

    def facts(self) -> dict[str, object]:
        """Return the content of run.json, which peftkit.report.history reads as `RunFacts`."""
        recipe, base = self.recipe, self.base
        row = self.train[0]
        spans = [(kind, text[:MAX_SPAN_CHARS]) for kind, text in self.task.spans(row)]
        return {
            "recipe": recipe.model_dump(mode="json"),
            "recipe_yaml": schema.dump_yaml(recipe),
            "tables": [asdict(event) for event in self.events if isinstance(event, Table)],
            "notices": [event.text for event in self.events if isinstance(event, Notice)],
            "lengths": {"train": length_histogram(self.train), "eval": length_histogram(self.eval)},
            "row_source": str(getattr(row, "source", "")),
            "row": spans[:MAX_SPANS],
            "machine": {
                "base": base.name,
                "revision": base.revision,
                "fingerprint": base.fingerprint,
                "seed": recipe.train.seed,
                "cores": os.cpu_count(),
                "system": platform.platform(),
                "versions": dict(versions()),
            },
            "command": self.settings.command,
            "mergeable": not recipe.method.unmergeable,
        }

    def card(self, result: Result) -> str:
        """Return the model card of the trained adapter."""
        from peftkit.formats.card import PROOF_CHECK, adapter_usage, render_card, training_card
        from peftkit.formats.serving import served_rank

        recipe = self.recipe
        usage = adapter_usage(
            self.base.hub_id or self.base.name,
            str(self.folder),
            rank=served_rank(self.adapter.method),
            command=self.settings.command,
            purpose=self.settings.purpose,
        )
        if (self.folder / PROOF).is_file():
            usage.append(PROOF_CHECK)
        card = training_card(
            self.base,
            self.adapter,
            data=f"{recipe.data.train_name}, {rows_in_words(self.train)}",
            steps=f"{result.step:,} ({result.metrics['epochs']:.2f} epochs)",
            metrics={
                loss_name(result.step) if name == "loss" else name: value
                for name, value in result.metrics.items()
            },
            recipe=schema.dump_yaml(recipe),
            usage=usage,
            eval_data=recipe.data.eval,
            auto_class=self.settings.auto_class,
        )
        return render_card(card)


def rows_in_words(rows: Sequence[object]) -> str:
    """Return "180 rows", or "180 rows, packed into 6"."""
    documents = getattr(rows, "document_lengths", None)
    if documents is None:
        return f"{len(rows):,} rows"
    return f"{len(documents):,} rows, packed into {len(rows):,}"


def length_histogram(rows: Sequence[object]) -> tuple[tuple[int, int], ...]:
    """Return (lower edge, number of documents) for equal bins of document lengths."""
    lengths: Tensor | None = getattr(rows, "document_lengths", None)  # of packed documents
    if lengths is None:
        lengths = tokens_of_each(rows)
    if not len(lengths):
        return ()
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // NUM_BARS))
    counts = ((lengths - low) // width).bincount().tolist()
    return tuple((low + width * n, count) for n, count in enumerate(counts))


def facts_writer(record: RunRecord, on_event: Listener) -> Listener:
    """Return a listener that writes run.json when training starts.

    A run that is refused earlier, such as a resume with other settings, changes no file.
    """

    def write(event: Event) -> None:
        if isinstance(event, RunStarted):
            path = record.folder / FACTS
            _try_to_write(path, lambda: json.dumps(record.facts(), indent=2), on_event)

    return write


def save_result(record: RunRecord, result: Result, *, on_event: Listener = ignore) -> Result:
    """Write the adapter, the recipe and the model card; return the result with its metrics.

    With a sharded base all processes must call this; the main process writes.
    """
    weights = record.adapter_folder()
    if record.recipe.train.keep_best:
        result = _with_best(record.recipe, result, weights, on_event)
    if not result.is_main:
        return _with_metrics(record, result, ignore)
    folder = record.folder
    weights.save(folder)
    shutil.rmtree(folder / OVERWRITTEN, ignore_errors=True)  # see `set_aside`
    if warning := refused_by_peft(record.adapter):
        on_event(Notice(warning))
    result = _with_metrics(record, result, on_event)
    if record.recipe.train.proof != "off" and not is_sharded(record.base.model):
        _write_proof(record, folder, on_event)
    _try_to_write(folder / RECIPE, lambda: schema.dump_yaml(record.recipe), on_event)
    _try_to_write(folder / CARD, lambda: record.card(result), on_event)
    on_event(Saved("adapter", folder))
    return result


def _write_proof(record: RunRecord, folder: Path, on_event: Listener) -> None:
    """Write proof.json if the task's model completes text."""
    from peftkit.proof.record import is_provable
    from peftkit.proof.record import record as record_proof

    def content() -> str:
        prompts = record.recipe.train.proof
        given = () if prompts == "auto" else prompts
        digest, style = sha256_of(folder / TENSORS), record.task.rows.style
        on_event(Stage(f"Recording {PROOF}, with which peftkit prove finds the adapter elsewhere"))
        proof = record_proof(record.base, record.adapter, style, given, record.eval, digest)
        if num_rows := sum(prompt.is_of_rows for prompt in proof.prompts):
            text = f"{PROOF} has {len(proof.prompts)} prompts, {num_rows} of them from the eval"
            on_event(Notice(f"{text} rows; train.proof chooses others."))
        return proof.model_dump_json()

    if is_provable(record.settings):
        _try_to_write(folder / PROOF, content, on_event)


def _with_best(
    recipe: Recipe, result: Result, weights: AdapterFolder, on_event: Listener
) -> Result:
    """Load the best checkpoint's weights."""
    best, drift = result.best_step, recipe.train.drift
    if best is None and drift is not None and drift.limit is not None:
        text = f"No evaluation was within train.drift.limit, {drift.limit:g} nats per token"
        on_event(Notice(f"{text}: the adapter has the weights of the last step, {result.step}."))
    if result.best_checkpoint is None or best is None:
        return result
    metric = recipe.train.best_metric
    of_loss = f", {result.metrics['best_eval_loss']:.4g}" if metric == "loss" else ""
    if best != result.step:
        weights.load(result.best_checkpoint)
        last = {n: v for n, v in result.metrics.items() if not n.startswith("eval_drift")}
        result = replace(result, metrics=last)  # the drift is that of the last step
        text = (
            f"The adapter has the weights of step {best} with the best {metric} on the eval rows"
            f"{of_loss}. The weights of the last step, "
            f"{result.step}, are in {result.checkpoint}."
        )
        on_event(Notice(text))
    metrics = {**result.metrics, "adapter_step": float(best)}
    loss = metrics["eval_loss"] = metrics[recipe.train.name_of_best_loss]
    if "eval_perplexity" in metrics:
        metrics["eval_perplexity"] = perplexity(loss)
    return replace(result, metrics=metrics)


def _try_to_write(path: Path, content: Callable[[], str], on_event: Listener) -> None:
    """Write a file that the adapter does not need; if this fails, emit a Notice."""
    try:
        write_text(content(), path)
    except Exception as error:  # such a failure must not end the run
        on_event(Notice(f"{path.name} was not written; the adapter does not need it. {error}"))


def _with_metrics(run: RunRecord, result: Result, on_event: Listener) -> Result:
    """Add the task's metrics on the eval rows if the training loop has not computed them."""
    if not run.eval or (run.task.predicts_tokens and not run.settings.measures_before):
        return result
    from peftkit.train.metrics import MetricsFiles  # imports the trackers

    files = MetricsFiles(run.folder, lambda text: on_event(Notice(text)))
    listener = to_all(files.on_event, on_event) if result.is_main else on_event
    metrics = run.task.metrics(run.base.model, run.eval, on_event=listener)
    if not metrics:  # computed by the run's evaluations
        return result
    on_event(_metrics_table("The eval rows", metrics))
    named = {f"eval_{name}": value for name, value in metrics.items()}
    return replace(result, metrics={**result.metrics, **named})


def metrics_before_training(run: RunRecord, on_event: Listener) -> dict[str, float]:
    """Return the metrics of the untrained model on the eval rows, for tasks that report them.

    With a sharded base all processes must call this.
    """
    if not run.settings.measures_before or not run.eval:
        return {}
    with evaluating(run.base.model):
        metrics = run.task.metrics(run.base.model, run.eval, on_event=on_event)
    on_event(_metrics_table("The eval rows before training", metrics))
    return {f"before_{name}": value for name, value in metrics.items()}


def _metrics_table(title: str, metrics: Mapping[str, float]) -> Table:
    rows = tuple((metric_name(name), metric(name, value)) for name, value in metrics.items())
    return Table(title, ("metric", "value"), rows)
