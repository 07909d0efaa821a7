"""Run a recipe from top to bottom: base, adapter, rows, training, saving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from peftkit.adapter import Adapter, attach, check_fits
from peftkit.base.load import Base, open_base
from peftkit.base.skeleton import skeleton
from peftkit.config.schema import flat
from peftkit.data.records import check_exists, sources_of
from peftkit.data.rows.lazy import fingerprint
from peftkit.defaults import drift_advice, why_too_short
from peftkit.errors import ConfigError
from peftkit.events import Event, Listener, Notice, Table, ignore, to_all
from peftkit.execution.environment import select_device, world_size
from peftkit.execution.plan import ExecutionPlan, compute_dtype, plan_of
from peftkit.execution.signals import (
    SAVING,
    STOPPING,
    Interrupted,
    stop_requests,
    stopping_immediately,
)
from peftkit.execution.state import Result
from peftkit.execution.world import Rows, World, joined_ranks
from peftkit.figures import dtype_name, size
from peftkit.files.disk import check_folder
from peftkit.formats.card import adapter_table, small_reach
from peftkit.model.blocks import is_sharded, is_streamed
from peftkit.planning.resolve import resolve_plan
from peftkit.recipe import Recipe, check_settings
from peftkit.record import RunRecord, facts_writer, metrics_before_training, save_result
from peftkit.settings import BaseConfig, DriftConfig
from peftkit.tasks.config import TaskConfig
from peftkit.tasks.run_hooks import Reference, RunHooks
from peftkit.train.checkpoint_files import Checkpoints, versions
from peftkit.train.loop import train
from peftkit.train.metrics import check_services
from peftkit.train.start import locked, new_run, prepare_output, removed_if_empty

if TYPE_CHECKING:
    from peftkit.evaluation.drift import Drift
    from peftkit.evaluation.text_watch import Metric, TextWatch
    from peftkit.formats.open_adapter import Continued


def run(
    recipe: Recipe,
    *,
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    metrics: Mapping[str, Metric] | None = None,
    base: Base | None = None,
    on_event: Listener = ignore,
) -> Result:
    """Train a recipe's adapter and save it to `train.output_dir`.

    Args:
        resume: Continue from the newest valid checkpoint of the output folder; auto: if any.
        overwrite: Start again in a folder that already holds a run.
        allow_changes: Dotted keys in which a resumed run may differ from its checkpoint.
        metrics: Functions of a completion and its reference that return a float, by name; computed
            with train.eval_generate.
        base: The recipe's base, already loaded, to share between runs. A completed run detaches
            its adapter.
        on_event: Receives the events of peftkit.events.

    Raises:
        PeftkitError: The recipe, its files or this machine do not allow the run.
        Interrupted: SIGINT or SIGTERM arrived; the last step is saved.
    """
    check_settings(recipe, world_size())
    folder = recipe.train.output_dir
    if resume == "auto":
        from peftkit.train.resume import finished_or_resume

        done, resume, allow_changes = finished_or_resume(recipe, allow_changes, overwrite, on_event)
        if done is not None:
            return done
    command = {"resume": resume, "overwrite": overwrite, "allow_changes": list(allow_changes)}
    with joined_ranks() as world, ExitStack() as stack:
        is_new = not folder.exists()
        prepare_output(folder, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
        if resume:
            from peftkit.train.resume import check_settings_of_resume

            check_settings_of_resume(recipe, allow_changes)
        _check_services(recipe)
        world.check_equal_across_ranks(
            recipe=flat(recipe.model_dump(mode="json")), version=versions(), command=command
        )
        if world.world_size > 1:
            world.check_shared(folder)
        stack.enter_context(locked(folder))
        if is_new:
            stack.enter_context(removed_if_empty(folder))
        with stopping_immediately("stopped before the first step; the output folder is unchanged."):
            early_events: list[Event] = []
            recorder = to_all(early_events.append, on_event)
            record = prepare(recipe, base=base, resume=resume, world=world, on_event=recorder)
            _warn_if_short(record, world.world_size, recorder)
            record = replace(record, events=early_events)
            config = recipe.train
            watches = metrics or config.sample_every or config.eval_generate
            watch = _watch(record, metrics, on_event) if watches else None
            drift = _drift(record, config.drift, on_event) if config.drift else None
            base_metrics = {} if resume else metrics_before_training(record, recorder)
        with stop_requests(message=STOPPING) as stop:
            training = new_run(
                record.base.model,
                record.task,
                record.train,
                record.eval,
                recipe.train,
                stop=stop,
                on_event=to_all(facts_writer(record, on_event), on_event),
                plan=record.plan,
                world=world,
            )
            result = train(
                training,
                resume=allow_changes if resume else None,
                overwrite=overwrite,
                weights=record.adapter_folder(),
                identity=record.identity(),
                watch=watch,
                drift=drift,
            )
        if result.is_main or is_sharded(record.base.model):  # all processes run a sharded model
            with stop_requests(message=SAVING) as stop:
                result = replace(result, metrics={**base_metrics, **result.metrics})
                result = save_result(record, result, on_event=on_event)
                from peftkit.train.resume import finish

                finish(recipe, result, on_event)
            if stop.signum:
                raise Interrupted(stop.signum, f"the run is complete; the adapter is in {folder}.")
        if base is not None:
            record.adapter.detach()
        return result


def check(recipe: Recipe, *, num_rows: int = 2, on_event: Listener = ignore) -> None:
    """Check a recipe up to the first step, and emit the first rows with their target tokens.

    Raises:
        PeftkitError: The first error that would have stopped the run.
    """
    _check_services(recipe)
    check_folder(recipe.train.output_dir)
    plan = resolve_plan(recipe, on_event)
    record = prepare(recipe, plan=replace(plan, shard="none"), on_event=on_event)  # one process
    documents = getattr(record.train, "documents", record.train)  # packed rows hold several
    for row in documents[:num_rows]:
        spans = tuple(record.task.spans(row))
        on_event(Table(f"{row.source}, as the loss sees it", ("", "text"), spans))
    num_steps = recipe.train.num_steps(len(record.train))
    on_event(Notice(f"Execution plan: {plan.describe()}."))
    if advice := drift_advice(recipe.task, recipe.train, record.base.model.config):
        on_event(Notice(advice))
    verdict = "Valid, but short" if _warn_if_short(record, 1, on_event) else "Ready to train"
    evaluated = f", {len(record.eval)} to evaluate on" if record.eval else ""
    counts = f"{len(record.train)} rows{evaluated}, {num_steps} optimizer steps"
    on_event(Notice(f"{verdict}: {counts}."))


def _check_services(recipe: Recipe) -> None:
    check_services(recipe.train)
    if recipe.train.upload:
        from peftkit.train.resume import check_target

        check_target(recipe)


def _warn_if_short(record: RunRecord, processes: int, on_event: Listener) -> bool:
    """Return whether a run has too few steps to train well, and emit the reason."""
    rows = record.train
    num_documents = len(getattr(rows, "documents", rows))
    if warning := why_too_short(record.recipe.train, len(rows), num_documents, processes):
        on_event(Notice(warning))
    return bool(warning)


def prepare(
    recipe: Recipe,
    *,
    base: Base | None = None,
    plan: ExecutionPlan | None = None,
    resume: bool = False,
    world: World | None = None,
    on_event: Listener = ignore,
) -> RunRecord:
    """Load the base, attach the adapter and encode the rows: everything before the first step.

    Args:
        base: The recipe's base, already loaded, without an adapter.
        plan: By default the result of `resolve_plan`, or for a loaded base the requested plan.
        resume: A checkpoint is loaded next, so the adapter gets no initial values.
        world: The processes that run this together.

    Raises:
        PeftkitError: The base, a target or the data does not match the recipe.
    """
    held_out = [recipe.data.eval] if isinstance(recipe.data.eval, str) else []
    check_exists(*(source.path for source in sources_of(recipe.data)), *held_out)
    settings = recipe.task.resolve(recipe.data)
    if base is None:
        if not recipe.method.start_from:  # before loading, which may take an hour
            name, revision = recipe.base.model, recipe.base.revision
            check_fits(skeleton(name, revision=revision, purpose=settings.purpose), recipe.method)
        plan = plan or resolve_plan(recipe, on_event)
        if world is not None:
            world.check_equal_across_ranks(plan=plan.as_dict())
        base = open_base(recipe.base, settings.purpose, plan, world=world, on_event=on_event)
        if world is not None:
            world.check_equal_across_ranks(base={"fingerprint": base.fingerprint})
    dtype = dtype_name(compute_dtype(base.model))
    plan = plan or plan_of(
        recipe.train,
        base.device.type,
        world_size(),
        placement="stream" if is_streamed(base.model) else "device",
        dtype=dtype,
    )
    continued = None
    if recipe.method.start_from:
        from peftkit.formats.open_adapter import continue_adapter

        method, packing = recipe.method, recipe.base.quantize
        continued = continue_adapter(
            base, method, packing, auto_class=settings.auto_class, on_event=on_event
        )
    adapter = (
        continued.adapter if continued else _new_adapter(recipe, settings, base, resume, on_event)
    )
    on_event(adapter_table(adapter))
    if plan.is_sharded:
        base = _sharded(base, plan, on_event)
    if warning := small_reach(adapter, base.audit):
        on_event(Notice(warning))
    data, fields = recipe.data, settings.data_fields
    if data.packing and "packing" in fields and adapter.method.acts_on_input:
        data = data.without_packing()
        reason = f"{adapter.method.type} prepends virtual tokens to each row"
        on_event(Notice(f"Rows are not packed: {reason}."))
    style = continued.style if continued and "chat_template" in fields else None
    task = settings.on(
        base.model,
        base.processor,
        data,
        style=None if data.names_style else style,
        on_event=on_event,
    )
    if isinstance(task, RunHooks):
        _give_references(task, recipe.base, plan, base, adapter, continued)
    loader = task.rows
    rows, eval_rows = loader.load_splits(loader.data)
    new_style = loader.style
    if style and new_style and replace(style, system=new_style.system) != new_style:
        text = "The data section changes the prompt style of the adapter"
        on_event(Notice(f"{text}: {new_style.kind} instead of {style.kind}."))
    if world is not None:
        world.check_equal_across_ranks(rows={"train": _digest(rows), "eval": _digest(eval_rows)})
    recipe = recipe.model_copy(update={"data": loader.data})  # packing is resolved by the rows
    return RunRecord(recipe, plan, base, adapter, task, settings, rows, eval_rows, continued)


def _new_adapter(
    recipe: Recipe, settings: TaskConfig, base: Base, resume: bool, on_event: Listener
) -> Adapter:
    """Attach the adapter of a recipe that continues none."""
    fully = tuple(dict.fromkeys((*recipe.method.train_fully, *base.head)))
    method, starts = recipe.method.model_copy(update={"train_fully": fully}), None
    if recipe.base.new_tokens:
        from peftkit.base.new_tokens import add_tokens, token_rows

        rows = token_rows(base.model, add_tokens(base, recipe.base.new_tokens))
        method = method.model_copy(update={"token_rows": rows})
    train = recipe.train
    if method.initializer:  # it reads training rows, or the weights before quantisation
        from peftkit.methods.data_init import initial_values

        newest = (
            Checkpoints(train.output_dir, keep=1).newest_valid(ignore).folder if resume else None
        )
        read = settings, recipe.base, recipe.data
        method, starts = initial_values(
            method, base, *read, seed=train.seed, checkpoint=newest, on_event=on_event
        )
    return attach(base.model, method, starts=starts, fresh=not resume, seed=train.seed)


def _sharded(base: Base, plan: ExecutionPlan, on_event: Listener) -> Base:
    """Shard the base over the processes; return it with the device of this process."""
    from peftkit.base.sharding import local_bytes, shard_base

    base = replace(base, device=select_device())
    whole = local_bytes(base.model)["base"]
    shard_base(base.model, base.device, offload=plan.shard == "offload")
    sizes = f"{size(local_bytes(base.model)['base'], 2)} of {size(whole, 2)}"
    on_event(Notice(f"The base is sharded over the processes: {sizes}."))
    return base


def _give_references(
    hooks: RunHooks,
    config: BaseConfig,
    plan: ExecutionPlan,
    base: Base,
    adapter: Adapter,
    continued: Continued | None,
) -> None:
    """Pass the reference model and the task's further adapters to its hooks."""
    names = ("quantize", "double_quant", "quantize_embeddings", "quantize_towers")
    settings = " ".join(str(getattr(config, name)) for name in names)
    key = f"{base.fingerprint} {compute_dtype(base.model)} {settings} {plan.autocast}"
    digest = "" if continued is None else f" {continued.digest}"
    hooks.set_reference(Reference(_before(adapter, continued), key + digest))
    for folder in hooks.other_adapters:
        from peftkit.formats.open_adapter import read_side_adapter

        hooks.add_adapter(folder, read_side_adapter(folder, base))


def _before(
    adapter: Adapter, continued: Continued | None
) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of contexts with the model as it was before training."""
    return (
        adapter.disabled if continued is None else partial(adapter.swapped_state, continued.start)
    )


def _digest(rows: Rows) -> str:
    """Return the number of rows, and a hash of the first and the last one."""
    return f"{len(rows)} rows, {fingerprint([rows[n] for n in (0, -1) if len(rows)])}"


def _watch(
    record: RunRecord, metrics: Mapping[str, Metric] | None, on_event: Listener
) -> TextWatch:
    """Return the generator of samples and completions during training."""
    config = record.recipe.train
    if metrics and not config.eval_generate:
        raise ConfigError(
            f"--metric {', '.join(metrics)} has no effect.",
            found="train.eval_generate is not set.",
            fix="Set the number of eval rows to generate for: --set train.eval_generate=64",
        )
    from peftkit.evaluation.text_watch import TextWatch
    from peftkit.tasks.completions import CompletingTask

    assert isinstance(record.task, CompletingTask)  # see check_settings
    return TextWatch(record.base, record.task, record.eval, config, metrics, on_event)


def _drift(record: RunRecord, config: DriftConfig, on_event: Listener) -> Drift:
    """Return what measures train.drift."""
    from peftkit.evaluation.drift import Drift
    from peftkit.tasks.completions import CompletingTask
    from peftkit.tasks.tokens import TokenTask

    base, before, task = record.base, _before(record.adapter, record.continued), record.task
    assert isinstance(task, TokenTask)  # see check_settings
    assert isinstance(task, CompletingTask)
    return Drift(
        base.model,
        base.tokenizer,
        before,
        config,
        forget_layout=task.layout.forget,
        prompt_format=task.prompt_format,
        on_event=on_event,
    )
