"""A sweep: several runs over one base, one after the other.

The base is loaded once, and rows with equal settings are encoded once. Each member is the run that
it would be alone (`peftkit.run.run`), in a folder of its own below that of the sweep:

    sweep.json          every member's settings, state and losses
    report.html         the curves of all members
    best/               a copy of the best member's adapter
    NAME/               a member's run, which `peftkit train --resume` continues, too
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peftkit.adapter import check_fits
from peftkit.base.load import Base, open_base
from peftkit.base.purpose import Purpose
from peftkit.base.skeleton import skeleton
from peftkit.config.schema import flat
from peftkit.config.strict_yaml import SourceLocation, parse, written_values
from peftkit.errors import ConfigError, OutputError, PeftkitError, RunError
from peftkit.events import (
    EvalDone,
    Event,
    Listener,
    Notice,
    RunStarted,
    Saved,
    Stage,
    StepDone,
    Table,
    ignore,
    to_all,
)
from peftkit.execution.environment import world_size
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.signals import Interrupted, stopping_immediately
from peftkit.figures import duration, loss_name, recent_mean
from peftkit.files.disk import LOCKS, new_folder, read_json, writable_folder, write_json
from peftkit.formats.folders import SWEEP
from peftkit.planning.resolve import resolve_plan
from peftkit.recipe import Recipe, check_settings, load
from peftkit.report.history import is_run
from peftkit.report.page import REPORT, LiveReport, write_report
from peftkit.run import run
from peftkit.train.checkpoint_files import Checkpoints
from peftkit.train.metrics import require_trackers
from peftkit.train.start import locked, prepare_output

BEST = "best"
MAX_MEMBERS = 256
FIX_OVER = "Write KEY=VALUE,VALUE: method.rank=8,16,64"


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a sweep.

    Attributes:
        name: Of its folder.
        settings: Its own settings, by dotted key.
    """

    name: str
    recipe: Recipe
    settings: Mapping[str, Any]


@dataclass(slots=True)
class Outcome:
    """The state of a member, as sweep.json has it.

    Attributes:
        state: "waiting", "done" or "failed".
        loss: Of the last steps (`recent_mean`).
        eval_loss: Of the last evaluation, or None.
        error: Why it failed.
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
        """The sort key: eval loss, or training loss without eval rows; failed members last."""
        value = self.loss if self.eval_loss is None else self.eval_loss
        return self.state == "failed" or value is None, math.inf if value is None else value


def default_folder(path: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Return the folder of a sweep without --out: the recipe's train.output_dir, if set."""
    train = load(path, overrides).train
    return train.output_dir if "output_dir" in train.model_fields_set else Path("runs/sweep")


def grid(
    path: str | Path, over: Sequence[str], overrides: Sequence[str] = (), *, out: Path
) -> list[Member]:
    """Return a member for each combination of values.

    Args:
        path: The recipe.
        over: "section.key=value,value,..." each.
        overrides: "section.key=value" each, for all members.
        out: Each member trains into a folder of its own below this one.

    Raises:
        ConfigError: As `load`; or a key has no values, or is given twice.
    """
    axes = [_axis(text) for text in over]
    keys = [key for key, _ in axes]
    if not axes or len(set(keys)) < len(keys):
        raise ConfigError(
            "a sweep varies at least one setting, each once",
            found=f"--over: {', '.join(keys) or 'nothing'}",
            fix="peftkit sweep RECIPE --over method.rank=8,16 --over train.learning_rate=1e-4,3e-4",
        )
    products = itertools.product(*(values for _, values in axes))
    choices = [dict(zip(keys, values, strict=True)) for values in products]
    picked = {_name(settings): settings for settings in choices}
    if len(picked) < len(choices):
        raise ConfigError("two members of the sweep are the same", found="; ".join(over))
    return _members(path, picked, overrides, out)


def pick(
    path: str | Path, file: str | Path, overrides: Sequence[str] = (), *, out: Path
) -> list[Member]:
    """Return the members that a YAML file defines: {small: {method.rank: 8}, ...}.

    Raises:
        ConfigError: As `load`; or the file has another form.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    parsed = parse(text, lambda line: SourceLocation(str(file), line))
    data = parsed.data
    if (
        parsed.problems
        or not isinstance(data, dict)
        or not data
        or not all(isinstance(settings, dict) for settings in data.values())
    ):
        raise ConfigError(
            f"{file} does not name the members of a sweep",
            fix="Write a line for each: NAME: {method.rank: 8, train.learning_rate: 1e-4}",
        )
    picked = {
        str(name): {
            str(key): value if isinstance(value, str) else json.dumps(value)
            for key, value in settings.items()
        }
        for name, settings in data.items()
    }
    return _members(path, picked, overrides, out)


def sweep(
    members: Sequence[Member],
    out: str | Path,
    *,
    resume: bool = False,
    on_event: Listener = ignore,
) -> list[Outcome]:
    """Train the members one after the other; each has a folder below `out`.

    A member that fails does not end the others, unless no member has taken a step before: an error
    of the first is most likely one of all.

    Args:
        members: From `grid` or `pick`.
        out: The folder of the sweep.
        resume: Continue the sweep in that folder. Members that failed are tried again.

    Returns:
        The members, the best first: by eval loss, or by the training loss without eval rows.

    Raises:
        ConfigError: The members do not have one base.
        PeftkitError: As `peftkit.run.run`, before any member has taken a step.
        RunError: Every member failed.
        Interrupted: SIGINT or SIGTERM came; all progress is saved.
    """
    purpose = check_members(members)
    out, on_event = Path(out), _without_repeats(on_event)
    outcomes = _outcomes_in(out, members, resume)
    waiting = [member for member in members if outcomes[member.name].state != "done"]
    for member in waiting:
        settings = member.recipe.train
        prepare_output(settings.output_dir, resume=resume and _has_checkpoints(member))
        require_trackers(settings.log_to)
    _check_targets(waiting, purpose)
    base: Base | None = None
    with locked(out), ExitStack() as stack:
        locks = {member.name: _lock(member, stack) for member in members}
        for number, member in enumerate(waiting, 1):
            on_event(Stage(f"Preparing {member.name} ({number} of {len(waiting)})"))
            if base is None:
                release_memory()
                base = _load_base(waiting, purpose, on_event)
            locks[member.name].close()  # the run takes it
            _train(member, base, out, outcomes, resume, on_event)
            _lock(member, stack)
            recipe = member.recipe
            if recipe.base.new_tokens or recipe.method.start_from:
                base = None  # it has more tokens now
            elif outcomes[member.name].state == "failed":
                base = None  # the run may have left its adapter on it
        return _finish(out, outcomes, on_event)


def _lock(member: Member, stack: ExitStack) -> ExitStack:
    """Lock a member's folder until the sweep ends, or until the returned stack is closed.

    Raises:
        OutputError: Another process trains into it; names it.
    """
    lock = stack.enter_context(ExitStack())
    folder = writable_folder(member.recipe.train.output_dir)
    lock.enter_context(locked(folder))
    return lock


def check_members(members: Sequence[Member]) -> Purpose:
    """Check that all members share one base; return the purpose that it is loaded for.

    Raises:
        ConfigError: Names the first setting that differs, and in which members.
    """
    if len(members) < 2 or len(members) > MAX_MEMBERS:
        raise ConfigError(
            f"a sweep has from 2 to {MAX_MEMBERS} members", found=f"There are {len(members)}."
        )
    if world_size() > 1:
        raise ConfigError(
            "a sweep runs in one process", fix="Start it without accelerate launch or torchrun."
        )
    first = members[0]
    shared, purpose = first.recipe.base, _purpose(first)
    for member in members:
        check_settings(member.recipe, 1)
        for key in type(shared).model_fields:
            expected, value = getattr(shared, key), getattr(member.recipe.base, key)
            if value != expected:
                raise _differs(f"base.{key}", first, expected, member, value)
        other = replace(_purpose(member), task=purpose.task)  # a name, for messages
        if other != purpose:
            raise _differs("what the task loads the base for", first, purpose, member, other)
    return purpose


def _purpose(member: Member) -> Purpose:
    return member.recipe.task.resolve(member.recipe.data).purpose


def _differs(key: str, first: Member, expected: Any, other: Member, value: Any) -> ConfigError:
    return ConfigError(
        f"members of a sweep share one base; {key} differs",
        found=f"{first.name}: {expected}\n{other.name}: {value}",
        fix="Run a sweep for each.",
    )


def _check_targets(members: Sequence[Member], purpose: Purpose) -> None:
    """Check the targets and ranks of each method, before any member trains."""
    methods = {member.recipe.method.model_dump_json(): member.recipe for member in members}
    for recipe in methods.values():
        if not recipe.method.start_from:
            model, revision = recipe.base.model, recipe.base.revision
            check_fits(skeleton(model, revision=revision, purpose=purpose), recipe.method)


def _load_base(members: Sequence[Member], purpose: Purpose, on_event: Listener) -> Base:
    """Load the shared base; its blocks are streamed if a member needs that."""
    with stopping_immediately("stopped before the base was loaded."):
        for member in members:
            plan = resolve_plan(member.recipe, on_event)
            if plan.placement == "stream":
                break
        return open_base(members[0].recipe.base, purpose, plan, on_event=on_event)


def _without_repeats(on_event: Listener) -> Listener:
    """Pass on each notice and table once: members share most of them."""
    passed: list[Event] = []

    def listener(event: Event) -> None:
        if event in passed:
            return
        if isinstance(event, Notice | Table):
            passed.append(event)
        on_event(event)

    return listener


def _has_checkpoints(member: Member) -> bool:
    return bool(Checkpoints(member.recipe.train.output_dir, keep=1).steps())


def _train(
    member: Member,
    base: Base,
    out: Path,
    outcomes: Mapping[str, Outcome],
    resume: bool,
    on_event: Listener,
) -> None:
    """Run one member, and record its outcome."""
    outcome, began = outcomes[member.name], time.perf_counter()
    losses = list[float]()

    def record(event: Event) -> None:
        if isinstance(event, RunStarted):
            _write(out, outcomes)  # from here on there is something to resume
        elif isinstance(event, StepDone):
            losses.append(event.loss)
            outcome.steps, outcome.loss = event.step, recent_mean(losses)
        elif isinstance(event, EvalDone):
            outcome.eval_loss = event.metrics.get("loss")
        on_event(event)

    report = LiveReport(member.recipe.train.output_dir, on_event)
    listener = to_all(record, report.on_event)
    try:
        again = resume and _has_checkpoints(member)
        result = run(member.recipe, resume=again, base=base, on_event=listener)
    except Interrupted as error:
        _write(out, outcomes)
        raise Interrupted(
            error.signum, f"all that the members of {out} reached is saved. Go on with --resume."
        ) from None
    except PeftkitError as error:
        if not any(each.steps for each in outcomes.values()):
            raise
        outcome.state, outcome.error = "failed", str(error)
        outcome.seconds = time.perf_counter() - began
        on_event(Notice(f"{member.name} has failed, the others go on. {error}"))
    else:
        outcome.state, outcome.error, outcome.seconds = "done", "", result.seconds
        outcome.steps, outcome.loss = result.step, result.metrics["loss"]
        outcome.eval_loss = result.metrics.get("eval_loss", outcome.eval_loss)
    _write(out, outcomes)


def _outcomes_in(out: Path, members: Sequence[Member], resume: bool) -> dict[str, Outcome]:
    """Return the saved outcomes of members; refuse the folder of another sweep."""
    outcomes = {
        m.name: Outcome(m.name, dict(m.settings), str(m.recipe.train.output_dir)) for m in members
    }
    file = out / SWEEP
    if not file.exists():
        if resume:
            raise OutputError(f"there is no sweep to resume in {out}", fix="Leave out --resume.")
        writable_folder(out)
        return outcomes
    if not resume:
        raise OutputError(
            f"{out} already holds a sweep",
            fix="Go on with it (--resume), or give another folder (--out DIR).",
        )
    entries = {entry["name"]: entry for entry in read_json(file)["members"]}
    saved = {name: entry["settings"] for name, entry in entries.items()}
    if saved != {m.name: dict(m.settings) for m in members}:
        raise OutputError(
            f"the sweep in {out} has other members",
            found=", ".join(entries),
            fix="Resume it with the settings that it was begun with, or give another folder.",
        )
    done = {n: Outcome(**entry) for n, entry in entries.items() if entry["state"] == "done"}
    return outcomes | done


def _write(out: Path, outcomes: Mapping[str, Outcome], best: str | None = None) -> None:
    entries = [asdict(outcome) for outcome in outcomes.values()]
    write_json({"members": entries, "best": best}, out / SWEEP)


def _finish(out: Path, outcomes: Mapping[str, Outcome], on_event: Listener) -> list[Outcome]:
    """Write the report of all members, copy the best adapter, and show the table."""
    ranked = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
    folders = [outcome.folder for outcome in ranked if is_run(Path(outcome.folder))]
    try:
        on_event(Saved("report", write_report(folders, out / REPORT)))
    except Exception as error:  # a report costs no sweep
        on_event(Notice(f"{REPORT} was not written: {error}"))
    best = ranked[0]
    if best.state == "failed":
        raise RunError(
            "every member of the sweep failed", found=best.error, fix=f"See {out}/{SWEEP}"
        )
    _write(out, outcomes, best.name)
    left_out = shutil.ignore_patterns("checkpoints", "metrics.jsonl", LOCKS)
    with new_folder(out / BEST, last="adapter_config.json") as folder:
        shutil.copytree(best.folder, folder, ignore=left_out, dirs_exist_ok=True)
    on_event(_table(ranked))
    on_event(Saved("best adapter", out / BEST))
    return ranked


def _table(ranked: Sequence[Outcome]) -> Table:
    keys = list(dict.fromkeys(key for outcome in ranked for key in outcome.settings))
    rows = tuple(
        (
            outcome.name,
            *(str(outcome.settings.get(key, "")) for key in keys),
            "-" if outcome.eval_loss is None else f"{outcome.eval_loss:.4f}",
            "-" if outcome.loss is None else f"{outcome.loss:.4f}",
            str(outcome.steps),
            duration(outcome.seconds),
            outcome.state,
        )
        for outcome in ranked
    )
    names = [key.rpartition(".")[2] for key in keys]
    columns = ("member", *names, "eval loss, last", loss_name(), "steps", "time", "state")
    return Table("The sweep, best first", columns, rows)


def _members(
    path: str | Path, picked: Mapping[str, Mapping[str, str]], overrides: Sequence[str], out: Path
) -> list[Member]:
    members = []
    for name, settings in picked.items():
        if not re.fullmatch(r"\w[\w.=+-]*", name):
            raise ConfigError(f"'{name}' cannot be the name of a member, and of its folder")
        changes = [f"{key}={value}" for key, value in settings.items()]
        folder = json.dumps(str(out / name))
        recipe = load(path, [*overrides, *changes, f"train.output_dir={folder}"])
        values = flat(recipe.model_dump(mode="json"))
        members.append(Member(name, recipe, {k: values.get(k, settings[k]) for k in settings}))
    return members


def _axis(text: str) -> tuple[str, list[str]]:
    """Return a setting and its values, each as written."""
    key, _, listed = text.partition("=")
    values = written_values(listed)
    if not key or not values:
        raise ConfigError(f"--over {text}: no values to try", fix=FIX_OVER)
    return key, values


def _name(settings: Mapping[str, str]) -> str:
    """Return the name of a member's folder: "rank=8-learning_rate=1e-4"."""
    pairs = (f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
    return re.sub(r"[^\w.=+-]+", "_", "-".join(pairs)).strip("_")
