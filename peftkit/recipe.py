"""A recipe and its run: the whole story of training an adapter, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import model_validator

from peftkit.adapter import Adapter, attach
from peftkit.base.load import Base, BaseConfig, default_device, load_base
from peftkit.base.new_tokens import add_tokens, save_tokenizer, token_rows
from peftkit.base.purpose import Purpose
from peftkit.config import schema
from peftkit.config.schema import Config
from peftkit.data.load import DataConfig
from peftkit.errors import ConfigError
from peftkit.events import Listener, Notice, Saved, Table, ignore
from peftkit.files.disk import write_text
from peftkit.formats.card import (
    CARD,
    Card,
    adapter_table,
    adapter_usage,
    small_reach,
    training_card,
    write_card,
)
from peftkit.formats.continued import Continued, continue_adapter, save_start
from peftkit.formats.peft.folder import AdapterFolder, Provenance, read_adapter
from peftkit.formats.peft.limits import refused_by_peft
from peftkit.inference.watch import Metric, TextWatch
from peftkit.methods.data_init import as_on_main, init_from_rows, with_saved_ranks
from peftkit.methods.loftq import loftq_starts
from peftkit.methods.lora import LoRA
from peftkit.methods.protocol import Method, Start
from peftkit.methods.table import AnyMethod
from peftkit.model.roles import ALL_LINEAR
from peftkit.quant.quantize import tower_paths
from peftkit.report.facts import BeforeRun
from peftkit.report.live import LiveReport
from peftkit.tasks.causal_lm import CausalLMConfig
from peftkit.tasks.protocol import Task, TaskConfig
from peftkit.tasks.splits import load_splits
from peftkit.tasks.table import TASKS, AnyTask
from peftkit.train.checkpoints.checkpoint import Checkpoints
from peftkit.train.config import TrainConfig
from peftkit.train.loop import check_output, train_prepared
from peftkit.train.metrics import require_trackers
from peftkit.train.ranks import Ranks
from peftkit.train.run import Result
from peftkit.train.sharding import check_sharding, local_bytes, shard_base
from peftkit.train.signals import Interrupted, stop_requests, stopping_at_once

RECIPE = "recipe.yaml"


class Recipe(Config):
    """Everything that `peftkit train` needs to know."""

    task: AnyTask = CausalLMConfig()
    """What the model is trained to do: a word, or a section with that word as its type."""
    base: BaseConfig
    """The frozen model."""
    method: AnyMethod = LoRA()
    """What is trained beside it."""
    data: DataConfig
    """Rows to learn from."""
    train: TrainConfig = TrainConfig()
    """How to learn."""

    @model_validator(mode="after")
    def _start_suits_the_base(self) -> Recipe:
        self.method.check_quantize(self.base.quantize)
        return self

    @model_validator(mode="after")
    def _placement_suits_the_training(self) -> Recipe:
        kept = self.train.gradient_checkpointing is False
        if self.base.placement == "stream" and kept:
            raise ConfigError(
                "base.placement: stream recomputes activations.",
                found="train.gradient_checkpointing is false, which keeps every block's weights.",
                fix="Set it to auto or true, or base.placement: device.",
            )
        return self

    @model_validator(mode="after")
    def _data_suits_the_method(self) -> Recipe:
        if self.packs_beside_virtual_tokens and self.data.asks_to_pack:
            raise ConfigError(
                f"data.packing does not go with method.type: {self.method.type}.",
                found="Every row of text wants virtual tokens of its own before it.",
                fix="Set data.packing: false.",
            )
        if self.base.new_tokens and self.method.start_from:
            raise ConfigError(
                "base.new_tokens does not go with method.start_from.",
                found="The adapter that is gone on with has the rows that it has.",
                fix="Leave base.new_tokens out; tokens that the adapter knows are there.",
            )
        if self.base.new_tokens and self.method.token_rows:
            raise ConfigError(
                "base.new_tokens says which rows are trained.",
                found="method.token_rows does so too.",
                fix="Leave one of them out.",
            )
        return self

    @property
    def packs_beside_virtual_tokens(self) -> bool:
        """Whether rows would share the virtual tokens before them."""
        packs = self.data.packing and "packing" in self.task.data_fields
        return self.method.acts_on_input and packs

    @model_validator(mode="after")
    def _data_suits_the_task(self) -> Recipe:
        read = {"train", "eval", *self.task.data_fields}
        for name, field in DataConfig.model_fields.items():
            if name not in read and getattr(self.data, name) != field.default:
                users = [task for task, kind in TASKS.items() if name in kind.data_fields]
                raise ConfigError(
                    f"data.{name} is not used by the task {self.task.type}.",
                    found=f"Tasks that use it: {', '.join(users)}.",
                    fix="Leave it out.",
                )
        return self

    @model_validator(mode="after")
    def _what_is_watched_is_there(self) -> Recipe:
        train = self.train
        if train.evaluates and not self.data.eval:
            raise ConfigError(
                f"train.{train.evaluates[0]} needs eval rows.",
                found="data.eval is not set.",
                fix="Set data.eval, or leave it out.",
            )
        if (train.sample_every or train.eval_generate) and not self.task.writes_text:
            raise ConfigError(
                f"the task {self.task.type} writes no text to look at.",
                found="train.sample_every or train.eval_generate is set.",
                fix="Leave it out.",
            )
        return self


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that comes before the first step: the adapter on its base, and the encoded rows.

    Attributes:
        recipe: With its defaults as they are used here.
        task: On this base. settings: What makes it again, labels and all.
        continued: What the adapter was, if it goes on from another.
    """

    recipe: Recipe
    base: Base
    adapter: Adapter
    task: Task
    settings: TaskConfig
    train: Sequence[Any]
    eval: Sequence[Any]
    continued: Continued | None = None


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: A YAML file.
        overrides: "section.key=value" each; they go through the same validation.

    Raises:
        ConfigError: Every error at once, each with its file and line.
    """
    return schema.load(Recipe, Path(path), overrides)


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    metrics: Mapping[str, Metric] | None = None,
    on_event: Listener = ignore,
) -> Result:
    """Train a recipe's adapter and save it to `train.output_dir`.

    Args:
        recipe: What to do.
        resume: Continue from the newest valid checkpoint of the output folder.
        overwrite: Start again in a folder that holds a run already.
        allow_changes: Dotted keys in which a resumed run may differ from the one it continues.
        metrics: Of a completion and its reference, by name: measured with train.eval_generate.
        on_event: Receives the events of peftkit.events as they happen.

    Raises:
        PeftkitError: What was asked, what was found, what to do.
        Interrupted: SIGINT or SIGTERM came; what was reached is saved.
    """
    folder = recipe.train.output_dir
    if recipe.train.shard != "none":
        check_sharding(recipe.train, recipe.method.type, recipe.task.type)
    check_output(recipe.train, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
    with stopping_at_once("stopped before the first step; what was there is as it was."):
        before = BeforeRun(on_event)
        ready = prepare(recipe, resume=resume, on_event=before.on_event)
        watch = watch_of(recipe, ready, metrics, on_event)
    recipe = ready.recipe
    weights = adapter_folder(recipe, ready)
    report = LiveReport(folder, on_event, lambda: write_facts(recipe, ready, before))
    result = train_prepared(
        ready.base.model,
        ready.task,
        ready.train,
        ready.eval,
        recipe.train,
        weights=weights,
        identity=identity(recipe, ready),
        resume=resume,
        overwrite=overwrite,
        allow_changes=allow_changes,
        on_event=report.on_event,
        watch=watch,
    )
    if recipe.train.shard != "none":
        result = _measured(ready, result, on_event)  # all processes run the model
    if result.is_main:
        with stop_requests() as stop:
            result = save_result(recipe, ready, result, on_event=on_event)
            report.write()
        if stop.signum:
            raise Interrupted(stop.signum, f"all is done; the adapter is in {folder}.")
    return result


def adapter_folder(recipe: Recipe, ready: Prepared) -> AdapterFolder:
    """Return what a checkpoint holds of the model: an adapter folder."""
    start = ready.continued

    def beside(folder: Path) -> None:
        if recipe.base.new_tokens or (start and start.has_tokens):
            save_tokenizer(ready.base, folder)
        if start and ready.settings.needs_reference:
            save_start(start.start, folder)

    return AdapterFolder(ready.adapter, _provenance(recipe, ready), beside)


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
        **({"start": ready.continued.digest} if ready.continued else {}),
    }


def save_result(
    recipe: Recipe, ready: Prepared, result: Result, *, on_event: Listener = ignore
) -> Result:
    """Write the adapter, the recipe and the model card; return the result with its metrics."""
    folder = recipe.train.output_dir
    weights = adapter_folder(recipe, ready)
    result = _with_best(recipe, result, weights, on_event)
    weights.save(folder)
    if told := refused_by_peft(ready.adapter):
        on_event(Notice(told))
    if recipe.train.shard == "none":
        result = _measured(ready, result, on_event)
    _write_papers(recipe, ready, result, on_event)
    on_event(Saved("adapter", folder))
    return result


def watch_of(
    recipe: Recipe, ready: Prepared, metrics: Mapping[str, Metric] | None, on_event: Listener
) -> TextWatch | None:
    """Return what looks at the model's answers while it trains, if that is asked for."""
    asked = recipe.train.sample_every or recipe.train.eval_generate
    if metrics and not recipe.train.eval_generate:
        raise ConfigError(
            f"nothing is measured by {', '.join(metrics)}.",
            found="train.eval_generate is not set.",
            fix="Say how many eval rows are answered: --set train.eval_generate=64",
        )
    if not asked:
        return None
    return TextWatch(ready.base, ready.task, ready.eval, recipe.train, metrics, on_event)


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


def prepare(
    recipe: Recipe,
    *,
    base: Base | None = None,
    resume: bool = False,
    on_event: Listener = ignore,
) -> Prepared:
    """Do everything that comes before the first step.

    Args:
        base: As the recipe says, loaded already and bare.
        resume: A checkpoint is loaded next: the adapter has no values of its own until then.

    Raises:
        PeftkitError: The base, a target or the data is not as the recipe says.
    """
    settings = recipe.task.resolve(recipe.data)
    if base is None:
        base = open_base(recipe, settings.purpose, on_event=on_event)
    continued = None
    if recipe.method.start_from:
        continued = continue_adapter(
            base,
            recipe.method,
            recipe.base.quantize,
            auto_class=settings.auto_class,
            on_event=on_event,
        )
        adapter = continued.adapter
    else:
        method = _with_head_and_tokens(recipe, base)
        method, starts = _initial_values(recipe, method, settings, base, resume, on_event)
        seed = recipe.train.seed
        adapter = attach(base.model, method, starts=starts, fresh=not resume, seed=seed)
    on_event(adapter_table(adapter))
    if recipe.train.shard != "none":
        base = _sharded(recipe, base, on_event)
    if told := small_reach(adapter, base.audit):
        on_event(Notice(told))
    data = recipe.data
    if recipe.model_copy(update={"method": adapter.method}).packs_beside_virtual_tokens:
        data = data.without_packing()
        on_event(
            Notice(
                f"Rows are not packed: with {adapter.method.type} each has its own virtual tokens."
            )
        )
    task = settings.on(base.model, base.processor, data, on_event=on_event)
    task.refer_to(*_reference(recipe, base, adapter, continued))
    recipe = recipe.model_copy(update={"data": task.data_used(data)})
    train, evaluation = load_splits(task, recipe.data)
    return Prepared(recipe, base, adapter, task, settings, train, evaluation, continued)


def _sharded(recipe: Recipe, base: Base, on_event: Listener) -> Base:
    """Spread the base over the processes; return it as it is then, on this process's device."""
    device = default_device()
    whole = local_bytes(base.model)["base"]
    shard_base(base.model, device, offload=recipe.train.shard == "offload")
    own = local_bytes(base.model)["base"]
    on_event(Notice(f"The base is spread over processes: {own / 1e9:.2f} of {whole / 1e9:.2f} GB."))
    return replace(base, device=device)


def _reference(
    recipe: Recipe, base: Base, adapter: Adapter, continued: Continued | None
) -> tuple[Callable[[], AbstractContextManager[None]], str]:
    """Return what makes the model what it is before training, and what tells that from others."""
    precision = f"{base.model.dtype} {recipe.base.quantize} {recipe.base.double_quant}"
    key = f"{base.fingerprint} {precision}"
    if continued is None:
        return adapter.disabled, key
    return partial(adapter.holding, continued.start), f"{key} {continued.digest}"


def open_base(recipe: Recipe, purpose: Purpose, *, on_event: Listener = ignore) -> Base:
    """Load the base that a recipe names, for what its task needs it for; tells how it is stored."""
    base = load_base(
        recipe.base.model,
        revision=recipe.base.revision,
        dtype=recipe.base.dtype,
        quantize=recipe.base.quantize,
        double_quant=recipe.base.double_quant,
        quantize_towers=recipe.base.quantize_towers,
        placement=recipe.base.placement,
        store=recipe.base.store,
        purpose=purpose,
        device=None if recipe.train.shard == "none" else "cpu",
        on_event=on_event,
    )
    on_event(base.audit.table())
    return base


def _with_head_and_tokens(recipe: Recipe, base: Base) -> Method:
    """Return the method with all that is trained beside it; the base takes the new tokens in.

    Where no targets are named, towers for images and sound are left as they are.
    """
    whole = tuple(dict.fromkeys((*recipe.method.train_fully, *base.head)))
    beside: dict[str, Any] = {"train_fully": whole}
    unnamed = "targets" not in recipe.method.model_fields_set
    if unnamed and recipe.method.targets == ALL_LINEAR and tower_paths(base.model):
        beside["targets"] = (f"language.{ALL_LINEAR}",)
    if recipe.base.new_tokens:
        ids = add_tokens(base, recipe.base.new_tokens)
        beside["token_rows"] = token_rows(base.model, ids)
    return recipe.method.model_copy(update=beside)


def _initial_values(
    recipe: Recipe,
    method: Method,
    settings: TaskConfig,
    base: Base,
    resume: bool,
    on_event: Listener,
) -> tuple[Method, dict[str, Start] | None]:
    """Return the method, its ranks known, and initial values that need more than a layer, if any.

    This stage lies between loading the base and attaching the adapter: EVA reads training rows,
    LoftQ the weights before they were quantised. A resumed run loads its values, and has the ranks
    of its checkpoint.
    """
    if not isinstance(method, LoRA) or not method.started_by:
        return method, None
    if resume:
        newest = Checkpoints(recipe.train.output_dir, keep=1).newest_valid(ignore)
        return with_saved_ranks(base.model, method, read_adapter(newest.folder).method), None
    if method.init == "loftq":
        known = recipe.base.model_dump(include={"model", "revision", "dtype"})
        original = load_base(**known, purpose=settings.purpose, device="cpu", on_event=on_event)
        return method, loftq_starts(base.model, method, original.model)
    task = settings.on(base.model, base.processor, recipe.data)
    rows, _ = load_splits(task, recipe.data.model_copy(update={"eval": None}))
    found, starts = init_from_rows(base.model, method, task, rows, seed=recipe.train.seed)
    return as_on_main(base.model, method, found, starts, Ranks(base.device))


def check(recipe: Recipe, *, num_rows: int = 2, on_event: Listener = ignore) -> None:
    """Check all but the training, and show the first rows as the loss sees them.

    Raises:
        PeftkitError: The first thing that would have stopped the run.
    """
    require_trackers(recipe.train.log_to)
    whole = recipe.train.model_copy(update={"shard": "none"})  # this is one process
    recipe = recipe.model_copy(update={"train": whole})
    ready = prepare(recipe, on_event=on_event)
    for row in ready.train[:num_rows]:
        pieces = tuple(ready.task.spans(row))
        on_event(Table(f"{row.source}, as the loss sees it", ("", "text"), pieces))
    num_steps = recipe.train.num_steps(len(ready.train))
    on_event(Notice(f"All is well: {len(ready.train)} rows, {num_steps} optimizer steps."))


def _measured(ready: Prepared, result: Result, on_event: Listener) -> Result:
    """Add what a task is measured by beside a perplexity: it takes no longer than the loss."""
    if not ready.eval or ready.task.predicts_tokens:
        return result
    found = ready.task.metrics(ready.base.model, ready.eval, on_event=on_event)
    rows = tuple((name, f"{value:.4g}") for name, value in found.items())
    on_event(Table("The eval rows", ("metric", "value"), rows))
    measured = {f"eval_{name}": value for name, value in found.items()}
    return replace(result, metrics={**result.metrics, **measured})


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
    base = {"base": ready.base.name, "revision": ready.base.revision}
    before.write(
        recipe.train.output_dir,
        recipe,
        ready.task,
        {"train": ready.train, "eval": ready.eval},
        command=ready.settings.command,
        mergeable=not recipe.method.unmergeable,
        identity={**base, "fingerprint": ready.base.fingerprint, "seed": recipe.train.seed},
    )


def _provenance(recipe: Recipe, ready: Prepared) -> Provenance:
    return Provenance(
        base=ready.base.name,
        hub_id=ready.base.hub_id,
        revision=ready.base.revision,
        fingerprint=ready.base.fingerprint,
        loading=recipe.base.model_dump(
            mode="json", exclude={"model", "revision", "new_tokens", "store", "placement"}
        ),
        prompt_style=ready.task.style,
        task_type=ready.settings.task_type,
        task=ready.settings.model_dump(mode="json"),
    )


def _card(recipe: Recipe, ready: Prepared, result: Result) -> Card:
    data = f"{recipe.data.train_name}, {len(ready.train):,} rows after packing and filtering"
    usage = adapter_usage(
        ready.base.name,
        str(recipe.train.output_dir),
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
