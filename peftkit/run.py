"""A recipe and its run: the whole story of training an adapter, top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import cast

from peftkit.base.load import Base
from peftkit.base.sharding import is_sharded
from peftkit.config.schema import flat
from peftkit.errors import ConfigError
from peftkit.events import Event, Listener, Notice, Table, ignore, to_all
from peftkit.execution.environment import world_size
from peftkit.execution.signals import Interrupted, stop_requests, stopping_at_once
from peftkit.execution.state import Result
from peftkit.execution.world import joined_ranks
from peftkit.files.disk import check_folder
from peftkit.inference.evaluate import Metric, TextWatch
from peftkit.planning.resolve import resolve_plan
from peftkit.prepared import Prepared, prepare
from peftkit.recipe import Recipe, check_settings
from peftkit.record import RunRecord, facts_writer, metrics_before_training, save_result
from peftkit.tasks.seq2seq import EncoderDecoder
from peftkit.tasks.token_task import AnswerTask
from peftkit.train.checkpoints.checkpoint import StartPolicy, locked
from peftkit.train.checkpoints.manifest import versions
from peftkit.train.loop import check_output, new_run, train
from peftkit.train.metrics import require_trackers


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    metrics: Mapping[str, Metric] | None = None,
    base: Base | None = None,
    on_event: Listener = ignore,
) -> Result:
    """Train a recipe's adapter and save it to `train.output_dir`.

    Args:
        recipe: What to do.
        resume: Continue from the newest valid checkpoint of the output folder.
        overwrite: Start again in a folder that holds a run already.
        allow_changes: Dotted keys in which a resumed run may differ from the one it continues.
        metrics: Of a completion and its reference, by name: measured with train.eval_generate.
        base: The recipe's base, loaded already, for several runs over it in turn. After a run that
            returns, it has no adapter again.
        on_event: Receives the events of peftkit.events as they happen.

    Raises:
        PeftkitError: What was asked, what was found, what to do.
        Interrupted: SIGINT or SIGTERM came; what was reached is saved.
    """
    start = StartPolicy(resume, overwrite, allow_changes)
    check_settings(recipe, world_size())
    folder = recipe.train.output_dir
    with joined_ranks() as ranks, ExitStack() as stack:
        check_output(recipe.train, start)
        ranks.check_equal_across_ranks(
            recipe=flat(recipe.model_dump(mode="json")), version=versions(), command=asdict(start)
        )
        ranks.check_shared(folder)
        stack.enter_context(locked(folder))
        with stopping_at_once("stopped before the first step; what was there is as it was."):
            before: list[Event] = []
            early = to_all(before.append, on_event)
            ready = prepare(recipe, base=base, resume=resume, ranks=ranks, on_event=early)
            watch = watch_of(recipe, ready, metrics, on_event)
            base_metrics = {} if resume else metrics_before_training(ready, early)
        recipe, record = ready.recipe, RunRecord(ready, before)
        with stop_requests() as stop:
            run = new_run(
                ready.base.model,
                ready.task,
                ready.train,
                ready.eval,
                recipe.train,
                stop=stop,
                on_event=to_all(facts_writer(record, on_event), on_event),
                plan=ready.plan,
                world=ranks,
            )
            weights, identity = record.adapter_folder(), record.identity()
            result = train(run, start, weights=weights, identity=identity, watch=watch)
        if result.is_main or is_sharded(ready.base.model):  # then all processes run the model
            with stop_requests() as stop:
                result = replace(result, metrics={**base_metrics, **result.metrics})
                result = save_result(record, result, on_event=on_event)
            if stop.signum:
                raise Interrupted(stop.signum, f"all is done; the adapter is in {folder}.")
        if base is not None:
            ready.adapter.detach()
        return result


def check(recipe: Recipe, *, num_rows: int = 2, on_event: Listener = ignore) -> None:
    """Check all but the training, and show the first rows as the loss sees them.

    Raises:
        PeftkitError: The first thing that would have stopped the run.
    """
    require_trackers(recipe.train.log_to)
    check_folder(recipe.train.output_dir)
    plan = resolve_plan(recipe, on_event)
    ready = prepare(recipe, plan=replace(plan, shard="none"), on_event=on_event)  # one process
    documents = getattr(ready.train, "documents", ready.train)  # of packed rows, one by one
    for row in documents[:num_rows]:
        pieces = tuple(ready.task.spans(row))
        on_event(Table(f"{row.source}, as the loss sees it", ("", "text"), pieces))
    num_steps = recipe.train.num_steps(len(ready.train))
    on_event(Notice(f"Plan: {plan.describe()}."))
    on_event(Notice(f"All is well: {len(ready.train)} rows, {num_steps} optimizer steps."))


def watch_of(
    recipe: Recipe, ready: Prepared, metrics: Mapping[str, Metric] | None, on_event: Listener
) -> TextWatch | None:
    """Return what looks at the model's answers while it trains, if that is asked for."""
    asked = recipe.train.sample_every or recipe.train.eval_generate
    if metrics and not recipe.train.eval_generate:
        raise ConfigError(
            f"--metric {', '.join(metrics)} has no effect.",
            found="train.eval_generate is not set.",
            fix="Say how many eval rows are answered: --set train.eval_generate=64",
        )
    if not asked:
        return None
    task = cast("AnswerTask | EncoderDecoder", ready.task)  # see run/rules.py
    return TextWatch(ready.base, task, ready.eval, recipe.train, metrics, on_event)
