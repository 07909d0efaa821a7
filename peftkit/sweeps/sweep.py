"""A sweep: several runs over one frozen base, trained together in one process.

Each member is the run that it would be alone (peftkit.train.run): its own order of rows, loss,
optimizer, learning rates, evaluations, checkpoints and end, in a folder of its own, which
`peftkit train --resume` takes up too. Only the gradients are computed together (joint.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

from peftkit.base.load import Base
from peftkit.errors import ConfigError
from peftkit.events import EvalDone, Event, Listener, Notice, Stage, ignore
from peftkit.execution.signals import StopRequest, stop_requests
from peftkit.model.modes import begin_training, modes_kept
from peftkit.planning.resolve import resolve_plan, rounds
from peftkit.report.live import BeforeRun, LiveReport
from peftkit.run.prepare import Prepared, open_base, prepare
from peftkit.run.results import adapter_folder, identity, write_facts
from peftkit.sweeps.layers import Mounted
from peftkit.sweeps.loop import Live, Loop, has_checkpoints
from peftkit.sweeps.members import Member, check_members
from peftkit.sweeps.outcomes import Outcome, open_sweep, tell_outcomes, write_outcomes
from peftkit.tasks.loss import find_head
from peftkit.tasks.token_task import TokenTask
from peftkit.train.checkpoints.checkpoint import StartPolicy, locked
from peftkit.train.loop import check_output
from peftkit.train.run import Job, Run


def sweep(
    members: Sequence[Member],
    out: str | Path,
    *,
    resume: bool = False,
    on_event: Listener = ignore,
) -> list[Outcome]:
    """Train all members together; each has a folder below `out`, `best` is a copy of the best.

    Args:
        members: Of `grid` or `pick`.
        out: The folder of the sweep; sweep.json in it tells what became of each member.
        resume: Go on where a sweep in that folder stopped.

    Returns:
        The members, the best first: by eval loss, or by the last loss where there are no eval rows.

    Raises:
        ConfigError: The members cannot be trained together.
        PeftkitError: As `peftkit.recipe.run`, of the first member that it holds for.
        RunError: Every member failed.
        Interrupted: SIGINT or SIGTERM came; what was reached is saved.
    """
    check_members(members)
    out = Path(out)
    outcomes = open_sweep(members, out, resume)
    waiting = [m for m in members if outcomes[m.name].state == "waiting"]
    for member in waiting:
        check_output(member.recipe.train, StartPolicy(resume and has_checkpoints(member)))
    with locked(out):
        for part in rounds([member.recipe for member in waiting], on_event) if waiting else ():
            some = waiting[part.start : part.stop]
            _train(some, outcomes, out, resume=resume, on_event=on_event)
    return tell_outcomes(out, outcomes, on_event)


def _train(
    members: Sequence[Member],
    outcomes: Mapping[str, Outcome],
    out: Path,
    *,
    resume: bool,
    on_event: Listener,
) -> None:
    settings = members[0].recipe.task.resolve(members[0].recipe.data)
    plan = resolve_plan(members[0].recipe, on_event)
    base = open_base(members[0].recipe, plan, settings.purpose, on_event=on_event)
    with stop_requests() as stop, ExitStack() as stack:
        prepared = _prepared(members, base, resume, on_event)
        adapters = {name: ready.adapter.modules for name, (ready, _) in prepared.items()}
        mounted = Mounted(base.model, adapters)
        stack.callback(mounted.remove)
        live = {m.name: _live(m, *prepared[m.name], outcomes, stop, on_event) for m in members}
        stack.enter_context(modes_kept(base.model))
        begin_training(base.model)
        if members[0].recipe.train.gradient_checkpointing is True:
            learner = live[members[0].name].run.learner
            stack.callback(learner.blocks.restore)
            learner.blocks.set_activations(learner.plan.activations)
        tasks = [cast(TokenTask, one.ready.task) for one in live.values()]
        stack.enter_context(tasks[0].training(base.model))
        for task, one in zip(tasks, live.values(), strict=True):
            stack.enter_context(one.run.recorded())
            if task is not tasks[0]:
                stack.enter_context(task.training_with(tasks[0]))
        loop = Loop(live, mounted, out, outcomes, stop, on_event)
        write_outcomes(out, outcomes)
        loop.start(resume)
        loop.go()


def _prepared(
    members: Sequence[Member], base: Base, resume: bool, on_event: Listener
) -> dict[str, tuple[Prepared, BeforeRun]]:
    """Return each member's adapter, off the model, and its rows."""
    found: dict[str, tuple[Prepared, BeforeRun]] = {}
    for number, member in enumerate(members):
        on_event(Stage(f"Preparing {member.name} ({number + 1} of {len(members)})"))
        again = resume and has_checkpoints(member)
        heard = on_event if number == 0 else _listener(member.name, on_event)
        before = BeforeRun(heard)
        ready = prepare(member.recipe, base=base, resume=again, on_event=before.on_event)
        head = find_head(base.model)
        for path, module in ready.adapter.modules.items():
            if module.stacked or head in (module, module.base):
                raise ConfigError(
                    f"{member.name} cannot be trained together with others: it adapts {path}",
                    found="Its rows are not those of the batch, in their order.",
                    fix="Leave experts and the head out of method.targets, as [q, k, v, o].",
                )
        ready.adapter.take_out()
        found[member.name] = (ready, before)
    return found


def _live(
    member: Member,
    ready: Prepared,
    before: BeforeRun,
    outcomes: Mapping[str, Outcome],
    stop: StopRequest,
    on_event: Listener,
) -> Live:
    """Return a member with its run, whose report is written while it goes on."""
    recipe, adapter = member.recipe, ready.adapter
    report = LiveReport(
        recipe.train.output_dir,
        _listener(member.name, on_event),
        partial(write_facts, ready.recipe, ready, before),
    )
    parameters = {
        f"{path}.{name}": parameter
        for path, module in adapter.modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    job = Job(
        ready.base.model,
        ready.task,
        ready.train,
        ready.eval,
        recipe.train,
        parameters=parameters,
        weights=adapter_folder(recipe, ready),
        identity=identity(recipe, ready),
        on_event=report.on_event,
    )
    run = Run(job, stop)
    if run.ranks.world_size > 1:
        raise ConfigError(
            "a sweep runs in one process", fix="Start it without accelerate launch or torchrun."
        )
    return Live(member, ready, run, outcomes[member.name], report)


def _listener(name: str, on_event: Listener) -> Listener:
    """Tell of a member's evaluations and remarks; its steps are in its own metrics.jsonl."""

    def heard(event: Event) -> None:
        if isinstance(event, EvalDone):
            figures = ", ".join(f"{key} {value:.4g}" for key, value in event.metrics.items())
            on_event(Notice(f"{name}, step {event.step}: {figures}"))
        elif isinstance(event, Notice):
            on_event(Notice(f"{name}: {event.text}"))

    return heard
