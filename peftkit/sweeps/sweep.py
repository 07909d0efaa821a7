"""A sweep: several runs over one frozen base, trained together in one process.

Each member is the run that it would be alone (peftkit.train.run): its own order of rows, loss,
optimizer, learning rates, evaluations, checkpoints and end, in a folder of its own, which
`peftkit train --resume` takes up too. Only the gradients are computed together (joint.py).
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import nn

from peftkit.base.load import Base
from peftkit.errors import ConfigError, OutputError, PeftkitError, RunError
from peftkit.events import EvalDone, Event, Listener, Notice, Progress, Saved, Stage, Table, ignore
from peftkit.files.disk import read_json, writable_folder, write_json
from peftkit.model.modes import modes_kept
from peftkit.recipe import (
    Prepared,
    adapter_folder,
    identity,
    open_base,
    prepare,
    save_result,
)
from peftkit.sweeps.joint import JointLearner
from peftkit.sweeps.layers import Routing, mount
from peftkit.sweeps.members import Member, check_members, settings_of
from peftkit.tasks.head import TokenTask
from peftkit.train.checkpoints.checkpoint import Checkpoints
from peftkit.train.learner import NonFinite
from peftkit.train.loop import check_output
from peftkit.train.run import Result, Run
from peftkit.train.signals import Interrupted, StopRequest, stop_requests

SWEEP, BEST = "sweep.json", "best"
THIRDS = 3
"""Successive halving looks at the members after each third of their steps."""


@dataclass(slots=True)
class Outcome:
    """What became of a member, as sweep.json has it.

    Attributes:
        state: "waiting", "done", "halved" (stopped as one of the worse half), or "failed".
        eval_loss: The last one, or None. loss: Of the last step. error: Why it failed.
    """

    name: str
    settings: Mapping[str, Any]
    folder: str
    state: str = "waiting"
    steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    seconds: float = 0.0
    error: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """What members are sorted by: the eval loss, or the loss where there are no eval rows."""
        value = self.eval_loss if self.eval_loss is not None else self.loss
        return (self.state == "failed" or value is None, math.inf if value is None else value)


@dataclass(slots=True)
class _Live:
    """A member that is being trained."""

    member: Member
    ready: Prepared
    run: Run
    outcome: Outcome
    looked: int = 0
    listeners: ExitStack = field(default_factory=ExitStack)


def sweep(
    members: Sequence[Member],
    out: str | Path,
    *,
    resume: bool = False,
    halve: bool = False,
    on_event: Listener = ignore,
) -> list[Outcome]:
    """Train all members together; each has a folder below `out`, `best` is a copy of the best.

    Args:
        members: Of `grid`, `pick` or `each`.
        out: The folder of the sweep; sweep.json in it tells what became of each member.
        resume: Go on where a sweep in that folder stopped.
        halve: After each third of the steps stop the half whose eval loss is worse.

    Returns:
        The members, the best first: by eval loss, or by the last loss where there are no eval rows.

    Raises:
        ConfigError: The members cannot be trained together.
        PeftkitError: As `peftkit.recipe.run`, of the first member that it holds for.
        RunError: Every member failed.
        Interrupted: SIGINT or SIGTERM came; what was reached is saved.
    """
    check_members(members)
    if halve and not all(member.recipe.data.eval for member in members):
        raise ConfigError(
            "halving compares eval losses, and there are no eval rows", fix="Set data.eval."
        )
    out = Path(out)
    outcomes = _opened(members, out, resume)
    waiting = [m for m in members if outcomes[m.name].state == "waiting"]
    for member in waiting:
        check_output(
            member.recipe.train,
            resume=resume and _has_checkpoints(member),
            overwrite=False,
            allow_changes=(),
        )
    if waiting:
        _write(out, outcomes)
        _train(waiting, outcomes, out, resume=resume, halve=halve, on_event=on_event)
    return _told(out, outcomes, on_event)


def _opened(members: Sequence[Member], out: Path, resume: bool) -> dict[str, Outcome]:
    """Return the members' outcomes so far; refuses the folder of another sweep."""
    fresh = {
        m.name: Outcome(m.name, dict(m.settings), str(m.recipe.train.output_dir)) for m in members
    }
    file = out / SWEEP
    if not file.exists():
        if resume:
            raise OutputError(f"there is no sweep to resume in {out}", fix="Leave out --resume.")
        writable_folder(out)
        return fresh
    if not resume:
        raise OutputError(
            f"{out} already holds a sweep",
            fix="Go on with it (--resume), or give another folder (--out DIR).",
        )
    known = {entry["name"]: entry for entry in read_json(file)["members"]}
    asked = {m.name: settings_of(m)["settings"] for m in members}
    if asked != {name: entry["settings"] for name, entry in known.items()}:
        raise OutputError(
            f"the sweep in {out} has other members",
            found=", ".join(known),
            fix="Resume it with the settings that it was begun with, or give another folder.",
        )
    for name, entry in known.items():
        if entry["state"] in ("done", "halved"):
            fresh[name] = Outcome(**{key: entry[key] for key in Outcome.__slots__})
    return fresh


def _has_checkpoints(member: Member) -> bool:
    return bool(Checkpoints(member.recipe.train.output_dir, keep=1).steps())


def _train(
    members: Sequence[Member],
    outcomes: Mapping[str, Outcome],
    out: Path,
    *,
    resume: bool,
    halve: bool,
    on_event: Listener,
) -> None:
    settings = members[0].recipe.task.resolve(members[0].recipe.data)
    base = open_base(members[0].recipe, settings.purpose, on_event=on_event)
    with stop_requests() as stop, ExitStack() as stack:
        prepared = _prepared(members, base, resume, on_event)
        routing, unmount = mount(base.model, {n: r.adapter.modules for n, r in prepared.items()})
        stack.callback(unmount)
        live = {
            m.name: _Live(
                m,
                prepared[m.name],
                _run(m, prepared[m.name], stop, _listener(m.name, on_event)),
                outcomes[m.name],
            )
            for m in members
        }
        stack.enter_context(modes_kept(base.model))
        base.model.train()
        tasks = [cast(TokenTask, one.ready.task) for one in live.values()]
        stack.enter_context(tasks[0].training(base.model))
        for task, one in zip(tasks, live.values(), strict=True):
            stack.enter_context(one.run.recorded())
            if task is not tasks[0]:
                stack.enter_context(task.training_with(tasks[0]))
        loop = _Loop(live, routing, base.model, out, outcomes, stop, halve, on_event)
        loop.start(resume)
        loop.go()


def _prepared(
    members: Sequence[Member], base: Base, resume: bool, on_event: Listener
) -> dict[str, Prepared]:
    """Return each member's adapter, off the model, and its rows."""
    found: dict[str, Prepared] = {}
    for number, member in enumerate(members):
        on_event(Stage(f"Preparing {member.name} ({number + 1} of {len(members)})"))
        again = resume and _has_checkpoints(member)
        heard = on_event if number == 0 else _notices_of(member.name, on_event)
        ready = prepare(member.recipe, base=base, resume=again, on_event=heard)
        for path, module in ready.adapter.modules.items():
            if module.stacked or "head" in module.site.roles:
                raise ConfigError(
                    f"{member.name} cannot be trained together with others: it adapts {path}",
                    found="Its rows are not those of the batch, in their order.",
                    fix="Leave experts and the head out of method.targets, as [q, k, v, o].",
                )
        ready.adapter.take_out()
        found[member.name] = ready
    return found


def _run(member: Member, ready: Prepared, stop: StopRequest, on_event: Listener) -> Run:
    recipe = member.recipe
    parameters = {
        f"{path}.{name}": parameter
        for path, module in ready.adapter.modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    run = Run(
        ready.base.model,
        ready.task,
        ready.train,
        ready.eval,
        recipe.train,
        parameters=parameters,
        weights=adapter_folder(recipe, ready),
        identity=identity(recipe, ready),
        stop=stop,
        on_event=on_event,
    )
    if run.ranks.world_size > 1:
        raise ConfigError(
            "a sweep runs in one process", fix="Start it without accelerate launch or torchrun."
        )
    return run


class _Loop:
    """Steps all members until each has come to its end."""

    def __init__(
        self,
        live: dict[str, _Live],
        routing: Routing,
        model: nn.Module,
        out: Path,
        outcomes: Mapping[str, Outcome],
        stop: StopRequest,
        halve: bool,
        on_event: Listener,
    ) -> None:
        self.live, self.routing, self.model, self.out = live, routing, model, out
        self.outcomes, self.stop, self.halve, self.on_event = outcomes, stop, halve, on_event
        first = next(iter(live.values()))
        runs = {name: one.run for name, one in live.items()}
        self.learner = JointLearner(runs, cast(TokenTask, first.ready.task), routing)
        self.num_steps = max(one.run.num_steps for one in live.values())

    def start(self, resume: bool) -> None:
        """Start or resume every member."""
        for name, one in self.live.items():
            with self.routing.alone(name):
                again = resume and _has_checkpoints(one.member)
                one.run.start(() if again else None)
                one.run.learner.state.planned, one.run.learner.state.compiled = True, False
                one.run.say(one.run.header())
                if again:
                    one.run.after_step()

    def go(self) -> None:
        """Train until no member is left, or a signal comes."""
        self._end_those_done()
        while self.live:
            began = time.perf_counter()
            asked = {name: one.run.next_rows() for name, one in self.live.items()}
            done = self.learner.step(asked)
            seconds = (time.perf_counter() - began) / len(asked)
            for name, facts in done.items():
                self._stepped(self.live[name], facts, asked[name][1], seconds)
            if self.halve and not self.stop.signum:
                self._halve()
            self._end_those_done()
            if self.stop.signum:
                _write(self.out, self.outcomes)
                raise Interrupted(
                    self.stop.signum,
                    f"all members of {self.out} are saved. Go on with --resume.",
                )
            if self.live:
                step = max(one.outcome.steps for one in self.live.values())
                self.on_event(Progress(f"Training {len(self.live)} adapters", step, self.num_steps))

    def _stepped(self, one: _Live, facts: Any, rate: float, seconds: float) -> None:
        """Let a member count its step, evaluate and save; what breaks ends this member alone."""
        try:
            with self.routing.alone(one.member.name):
                if isinstance(facts, NonFinite):
                    raise one.run.broken(facts)
                one.run.stepped(facts, rate, seconds)
                one.run.after_step()
        except Interrupted:
            pass  # it is saved; the others are to be, too
        except PeftkitError as error:
            self._fail(one, error)
        self._note(one)

    def _note(self, one: _Live) -> None:
        state = one.run.learner.state
        one.outcome.steps, one.outcome.loss = state.step, state.loss
        one.outcome.eval_loss, one.outcome.seconds = state.eval_loss, state.step_seconds

    def _fail(self, one: _Live, error: PeftkitError) -> None:
        one.outcome.state, one.outcome.error = "failed", str(error)
        self.on_event(Notice(f"{one.member.name} has stopped, the others go on. {error}"))
        self._leave(one)

    def _end_those_done(self) -> None:
        for one in [one for one in self.live.values() if one.run.is_done]:
            with self.routing.alone(one.member.name):
                result = one.run.result()
                self._note(one)
                self._save(one, result)
            one.outcome.state = "done"
            self._leave(one)

    def _save(self, one: _Live, result: Result) -> None:
        save_result(one.member.recipe, one.ready, result, on_event=ignore)
        self.on_event(Saved("adapter", one.member.recipe.train.output_dir))

    def _leave(self, one: _Live) -> None:
        """Take a member out of the steps: the next ones have room for the others."""
        self.live.pop(one.member.name)
        one.run.learner.optimizer.zero_grad(set_to_none=True)
        _write(self.out, self.outcomes)

    def _halve(self) -> None:
        """Stop the worse half of the members, once all have done another third of their steps."""
        third = min(
            THIRDS * o.run.learner.state.step // o.run.num_steps for o in self.live.values()
        )
        if not 0 < third < THIRDS or any(one.looked >= third for one in self.live.values()):
            return
        for name, one in self.live.items():
            one.looked = third
            if one.run.learner.state.evaluated_step != one.run.learner.state.step:
                with self.routing.alone(name):
                    one.run.evaluate()
            self._note(one)
        worse = sorted(self.live.values(), key=lambda one: one.outcome.rank)
        for one in worse[(len(worse) + 1) // 2 :]:
            with self.routing.alone(one.member.name):
                one.run.saver.save()
                self._save(one, one.run.result())
            one.outcome.state = "halved"
            self.on_event(Notice(f"{one.member.name} is of the worse half and stops."))
            self._leave(one)


def _listener(name: str, on_event: Listener) -> Listener:
    """Tell of a member's evaluations and remarks; its steps are in its own metrics.jsonl."""

    def heard(event: Event) -> None:
        if isinstance(event, EvalDone):
            figures = ", ".join(f"{key} {value:.4g}" for key, value in event.metrics.items())
            on_event(Notice(f"{name}, step {event.step}: {figures}"))
        elif isinstance(event, Notice):
            on_event(Notice(f"{name}: {event.text}"))

    return heard


def _notices_of(name: str, on_event: Listener) -> Listener:
    def heard(event: Event) -> None:
        if isinstance(event, Notice):
            on_event(Notice(f"{name}: {event.text}"))

    return heard


def _write(out: Path, outcomes: Mapping[str, Outcome], best: str | None = None) -> None:
    entries = [
        {key: getattr(outcome, key) for key in Outcome.__slots__} for outcome in outcomes.values()
    ]
    write_json({"members": entries, "best": best}, out / SWEEP)


def _told(out: Path, outcomes: Mapping[str, Outcome], on_event: Listener) -> list[Outcome]:
    """Write the end of the sweep, copy the best adapter, and tell the table."""
    order = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
    best = order[0]
    if best.state == "failed":
        raise RunError(
            "every member of the sweep failed", found=best.error, fix=f"See {out}/{SWEEP}"
        )
    _write(out, outcomes, best.name)
    _copy(Path(best.folder), out / BEST)
    keys = list(dict.fromkeys(key for outcome in order for key in outcome.settings))
    rows = tuple(
        (
            outcome.name,
            *(str(outcome.settings.get(key, "")) for key in keys),
            "-" if outcome.eval_loss is None else f"{outcome.eval_loss:.4f}",
            "-" if outcome.loss is None else f"{outcome.loss:.4f}",
            str(outcome.steps),
            f"{outcome.seconds:.0f} s",
            outcome.state,
        )
        for outcome in order
    )
    names = [key.rpartition(".")[2] for key in keys]
    columns = ("member", *names, "eval loss", "loss", "steps", "time", "")
    on_event(Table("The sweep, best first", columns, rows))
    on_event(Saved("best adapter", out / BEST))
    return order


def _copy(folder: Path, to: Path) -> None:
    """Copy an adapter without its checkpoints; whole or not at all."""
    made = to.with_name(f".{to.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    shutil.rmtree(to, ignore_errors=True)
    made.rename(to)
