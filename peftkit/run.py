"""A recipe's run, top to bottom: base, adapter, rows, training, and what is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

from peftkit.adapter import Adapter, attach, check_fits
from peftkit.base.load import Base, open_base
from peftkit.base.skeleton import skeleton
from peftkit.config.schema import flat
from peftkit.data.encode import Style
from peftkit.data.pack import fingerprint
from peftkit.defaults import why_too_short
from peftkit.errors import ConfigError
from peftkit.events import Event, Listener, Notice, Table, ignore, to_all
from peftkit.execution.environment import default_device, free_now, world_size
from peftkit.execution.plan import ExecutionPlan, compute_dtype
from peftkit.execution.signals import (
    SAVING,
    STOPPING,
    Interrupted,
    stop_requests,
    stopping_immediately,
)
from peftkit.execution.state import Result
from peftkit.execution.world import World, joined_ranks
from peftkit.files.disk import check_folder
from peftkit.formats.card import adapter_table, small_reach
from peftkit.methods.base import Method
from peftkit.model.blocks import STREAMED, is_sharded
from peftkit.planning.resolve import plan_as_requested, resolve_plan
from peftkit.recipe import Recipe, check_settings
from peftkit.record import RunRecord, facts_writer, metrics_before_training, save_result
from peftkit.tasks.base import Reference, Task
from peftkit.tasks.config import TaskConfig
from peftkit.train.checkpoint_files import Checkpoints, versions
from peftkit.train.loop import train
from peftkit.train.metrics import require_trackers
from peftkit.train.start import locked, new_run, prepare_output, removed_if_empty


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    metrics: Mapping[str, Any] | None = None,
    base: Base | None = None,
    on_event: Listener = ignore,
) -> Result:
    """Train a recipe's adapter and save it to `train.output_dir`.

    Args:
        resume: Continue from the newest valid checkpoint of the output folder.
        overwrite: Start again in a folder that holds a run already.
        allow_changes: Dotted keys in which a resumed run may differ from the one it continues.
        metrics: Functions of a completion and its reference, by name, each returning a float:
            computed with train.eval_generate.
        base: The recipe's base, loaded already, for several runs over it in turn. A completed run
            detaches its adapter.
        on_event: Receives the events of peftkit.events as they happen.

    Raises:
        PeftkitError: What was asked, what was found, what to do.
        Interrupted: SIGINT or SIGTERM came; what was reached is saved.
    """
    start: dict[str, Any] = {"resume": resume, "overwrite": overwrite}
    start["allow_changes"] = list(allow_changes)
    check_settings(recipe, world_size())
    folder = recipe.train.output_dir
    with joined_ranks() as world, ExitStack() as stack:
        is_new = not folder.exists()
        prepare_output(folder, **start)
        if resume:
            from peftkit.train.resume import check_settings_of_resume

            check_settings_of_resume(recipe, allow_changes)
        require_trackers(recipe.train.log_to)
        world.check_equal_across_ranks(
            recipe=flat(recipe.model_dump(mode="json")), version=versions(), command=start
        )
        world.check_shared(folder)
        stack.enter_context(locked(folder))
        if is_new:
            stack.enter_context(removed_if_empty(folder))
        with stopping_immediately("stopped before the first step; nothing has changed."):
            before: list[Event] = []
            early = to_all(before.append, on_event)
            record = prepare(recipe, base=base, resume=resume, world=world, on_event=early)
            _tell_if_short(record, world.world_size, early)
            record = replace(record, events=before)
            watch = _watch(record, metrics, on_event)
            base_metrics = {} if resume else metrics_before_training(record, early)
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
            weights, identity = record.adapter_folder(), record.identity()
            result = train(training, **start, weights=weights, identity=identity, watch=watch)
        if result.is_main or is_sharded(record.base.model):  # then all processes run the model
            with stop_requests(message=SAVING) as stop:
                result = replace(result, metrics={**base_metrics, **result.metrics})
                result = save_result(record, result, on_event=on_event)
            if stop.signum:
                raise Interrupted(stop.signum, f"the run is complete; the adapter is in {folder}.")
        if base is not None:
            record.adapter.detach()
        return result


def check(recipe: Recipe, *, num_rows: int = 2, on_event: Listener = ignore) -> None:
    """Check all but the training, and show the first rows as the loss sees them.

    Raises:
        PeftkitError: The first thing that would have stopped the run.
    """
    require_trackers(recipe.train.log_to)
    check_folder(recipe.train.output_dir)
    plan = resolve_plan(recipe, on_event)
    record = prepare(recipe, plan=replace(plan, shard="none"), on_event=on_event)  # one process
    documents = getattr(record.train, "documents", record.train)  # of packed rows, one by one
    for row in documents[:num_rows]:
        spans = tuple(record.task.spans(row))
        on_event(Table(f"{row.source}, as the loss sees it", ("", "text"), spans))
    num_steps = recipe.train.num_steps(len(record.train))
    on_event(Notice(f"Plan: {plan.describe()}."))
    is_short = _tell_if_short(record, 1, on_event)
    verdict = "It would run" if is_short else "All is well"
    on_event(Notice(f"{verdict}: {len(record.train)} rows, {num_steps} optimizer steps."))


def _tell_if_short(record: RunRecord, processes: int, on_event: Listener) -> bool:
    """Tell whether a run has too few steps to learn, also in a notice."""
    rows = record.train
    num_documents = len(getattr(rows, "documents", rows))
    why = why_too_short(record.recipe.train, len(rows), num_documents, processes)
    if why:
        on_event(Notice(why))
    return bool(why)


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
        base: The recipe's base, loaded already, without an adapter.
        plan: How the recipe is carried out; by default as `resolve_plan` decides.
        resume: A checkpoint is loaded next: the adapter has no values of its own until then.
        world: The processes that do this together.

    Raises:
        PeftkitError: The base, a target or the data is not as the recipe says.
    """
    settings = recipe.task.resolve(recipe.data)
    if base is None:
        if not recipe.method.start_from:  # before an hour of loading, not after it
            name, revision = recipe.base.model, recipe.base.revision
            check_fits(skeleton(name, revision=revision, purpose=settings.purpose), recipe.method)
        plan = plan or resolve_plan(recipe, on_event)
        if world is not None:
            world.check_equal_across_ranks(plan=plan.as_dict())
        base = open_base(recipe.base, settings.purpose, plan, world=world, on_event=on_event)
        if world is not None:
            world.check_equal_across_ranks(base={"fingerprint": base.fingerprint})
    plan = plan or _plan_over(recipe, base)
    adapter, continued = _adapter(recipe, settings, base, resume, on_event)
    on_event(adapter_table(adapter))
    if plan.is_sharded:
        base = _sharded(plan, base, on_event)
    if warning := small_reach(adapter, base.audit):
        on_event(Notice(warning))
    if why := _why_unpacked(recipe, adapter):
        recipe = recipe.model_copy(update={"data": recipe.data.without_packing()})
        on_event(Notice(f"Rows are not packed: {why}."))
    style = continued.style if continued and "chat_template" in settings.data_fields else None
    kept = None if recipe.data.names_style else style
    task = settings.on(base.model, base.processor, recipe.data, style=kept, on_event=on_event)
    task.compare_with(_reference(recipe, base, adapter, continued))
    _add_other_adapters(task, base)
    rows, eval_rows = task.load_splits(task.data)
    recipe = recipe.model_copy(update={"data": task.data})  # packed or not, as the rows suit
    if style and task.style:
        _tell_of_another_style(style, task.style, on_event)
    if world is not None:
        world.check_equal_across_ranks(rows={"train": _digest(rows), "eval": _digest(eval_rows)})
    return RunRecord(recipe, plan, base, adapter, task, settings, rows, eval_rows, continued)


def _tell_of_another_style(learnt: Style, style: Style, on_event: Listener) -> None:
    """Tell that a continued adapter learns prompts of another style; system prompts may differ."""
    if replace(learnt, system=style.system) != style:
        text = "As the data section asks, the adapter goes on in another prompt style"
        on_event(Notice(f"{text} than it learnt: {style.kind}, and it was {learnt.kind}."))


def _plan_over(recipe: Recipe, base: Base) -> ExecutionPlan:
    """Return the plan of a recipe whose base is loaded."""
    dtype = str(compute_dtype(base.model)).removeprefix("torch.")
    plan = plan_as_requested(recipe, free_now(base.device), dtype)
    return replace(plan, placement="stream" if hasattr(base.model, STREAMED) else "device")


def _adapter(
    recipe: Recipe, settings: TaskConfig, base: Base, resume: bool, on_event: Listener
) -> tuple[Adapter, Any]:
    """Attach a new adapter, or the one that the recipe continues; return it and its start."""
    if recipe.method.start_from:
        from peftkit.formats.open_adapter import continue_adapter

        continued = continue_adapter(
            base,
            recipe.method,
            recipe.base.quantize,
            auto_class=settings.auto_class,
            on_event=on_event,
        )
        return continued.adapter, continued
    method, starts = _with_head_and_tokens(recipe, base), None
    if method.initializer:  # it reads training rows, or the weights before they were quantised
        from peftkit.methods.data_init import initial_values

        checkpoint = None
        if resume:
            checkpoint = Checkpoints(recipe.train.output_dir, keep=1).newest_valid(ignore).folder
        method, starts = initial_values(
            method,
            base,
            settings,
            recipe.base,
            recipe.data,
            seed=recipe.train.seed,
            checkpoint=checkpoint,
            on_event=on_event,
        )
    seed = recipe.train.seed
    return attach(base.model, method, starts=starts, fresh=not resume, seed=seed), None


def _with_head_and_tokens(recipe: Recipe, base: Base) -> Method:
    """Add the new tokens; return the method that trains their rows, and the head, in full."""
    fully = tuple(dict.fromkeys((*recipe.method.train_fully, *base.head)))
    update: dict[str, Any] = {"train_fully": fully}
    if recipe.base.new_tokens:
        from peftkit.base.new_tokens import add_tokens, token_rows

        ids = add_tokens(base, recipe.base.new_tokens)
        update["token_rows"] = token_rows(base.model, ids)
    return recipe.method.model_copy(update=update)


def _sharded(plan: ExecutionPlan, base: Base, on_event: Listener) -> Base:
    """Shard the base over the processes; return it on this process's device."""
    from peftkit.base.sharding import local_bytes, shard_base

    device = default_device()
    whole = local_bytes(base.model)["base"]
    shard_base(base.model, device, offload=plan.shard == "offload")
    part = local_bytes(base.model)["base"]
    sizes = f"{part / 1e9:.2f} of {whole / 1e9:.2f} GB"
    on_event(Notice(f"The base is sharded over the processes: {sizes}."))
    return replace(base, device=device)


def _why_unpacked(recipe: Recipe, adapter: Adapter) -> str:
    """Return why rows cannot be packed by default; "" if they can."""
    if recipe.model_copy(update={"method": adapter.method}).packs_beside_virtual_tokens:
        return f"with {adapter.method.type} each has its own virtual tokens"
    return ""


def _reference(recipe: Recipe, base: Base, adapter: Adapter, continued: Any) -> Reference:
    """Return the model before training, for losses that compare with it."""
    precision = f"{compute_dtype(base.model)} {recipe.base.quantize} {recipe.base.double_quant}"
    key = f"{base.fingerprint} {precision}"
    if continued is None:
        return Reference(adapter.disabled, key)
    state = partial(adapter.swapped_state, continued.start)
    return Reference(state, f"{key} {continued.digest}")


def _add_other_adapters(task: Task, base: Base) -> None:
    """Load the other adapters of a task over the same base."""
    for folder in task.other_adapters:
        from peftkit.formats.open_adapter import read_side_adapter

        task.add_adapter(folder, read_side_adapter(folder, base))


def _digest(rows: Sequence[Any]) -> str:
    """Return the number of rows, and a hash of the first and the last one."""
    return f"{len(rows)} rows, {fingerprint([rows[n] for n in (0, -1) if len(rows)])}"


def _watch(record: RunRecord, metrics: Mapping[str, Any] | None, on_event: Listener) -> Any:
    """Return the generator of samples and answers during training; None without any."""
    config = record.recipe.train
    if metrics and not config.eval_generate:
        raise ConfigError(
            f"--metric {', '.join(metrics)} has no effect.",
            found="train.eval_generate is not set.",
            fix="Say how many eval rows are answered: --set train.eval_generate=64",
        )
    if not (config.sample_every or config.eval_generate):
        return None
    from peftkit.inference.evaluate import TextWatch

    task = cast(Any, record.task)  # of a kind that writes text: see peftkit.recipe
    return TextWatch(record.base, task, record.eval, config, metrics, on_event)
