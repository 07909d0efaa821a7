"""Sweeps: several runs over one base, one after the other, each in a subfolder of the sweep.

sweep.json and sweep.csv have the settings, state and metrics of each member, report.html all
curves, and best/ a copy of the best member's adapter. A member's folder is an ordinary run: it can
be resumed alone.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from peftkit.adapter import check_fits
from peftkit.base.load import Base, open_base
from peftkit.base.purpose import Purpose
from peftkit.base.skeleton import skeleton
from peftkit.config.schema import flat
from peftkit.config.strict_yaml import SourceLocation, parse, written_values
from peftkit.errors import ConfigError, OutputError, PeftkitError, RunError
from peftkit.events import Event, Listener, Notice, Saved, Stage, Table, ignore, to_all
from peftkit.execution.environment import world_size
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.signals import Interrupted, stopping_immediately
from peftkit.figures import duration, loss_name, metric_name, score_of, short
from peftkit.files.disk import LOCKS, new_folder, read_json, writable_folder, write_json, write_text
from peftkit.files.strict_json import Json, JsonMap
from peftkit.formats.folders import ADAPTER_FILES, CONFIG, RECORDS, SWEEP
from peftkit.planning.resolve import resolve_plan
from peftkit.recipe import Recipe, check_settings, load
from peftkit.report.history import is_run, read_history
from peftkit.report.page import REPORT, LiveReport, write_report
from peftkit.run import run
from peftkit.train.checkpoint_files import Checkpoints
from peftkit.train.metrics import check_services
from peftkit.train.resume import check_target
from peftkit.train.start import locked, prepare_output

BEST = "best"
MAX_MEMBERS = 256
CSV, SEED = "sweep.csv", "train.seed"
MAX_METRICS = 3
"""Metrics of the eval rows that the table shows; sweep.json and sweep.csv have all."""


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a sweep: its folder name, and the settings that it changes, by dotted key."""

    name: str
    recipe: Recipe
    settings: JsonMap

    @property
    def folder(self) -> Path:
        return self.recipe.train.output_dir

    @property
    def has_checkpoints(self) -> bool:
        return bool(Checkpoints(self.folder, keep=1).steps())


@dataclass(slots=True)
class Outcome:
    """An entry of sweep.json: the state of a member, with the losses of its `Result`.

    Attributes:
        metrics: Other metrics of the eval rows, by name.
        best_metric: The metric by which members are ranked; "loss": the eval loss.
    """

    name: str
    settings: JsonMap
    folder: str
    state: Literal["waiting", "done", "failed"] = "waiting"
    steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    seconds: float = 0.0
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    best_metric: str = "loss"

    @property
    def rank(self) -> tuple[bool, float]:
        """The sort key: the metric or the eval loss, else the training loss; failed ones last."""
        if self.best_metric in self.metrics:
            return self.state == "failed", score_of(self.metrics, self.best_metric)
        value = self.loss if self.eval_loss is None else self.eval_loss
        return self.state == "failed" or value is None, math.inf if value is None else value


def grid(
    path: str | Path, over: Sequence[str], overrides: Sequence[str] = (), *, out: Path
) -> list[Member]:
    """Return a member for each combination of values, named "rank-8_learning_rate-1e-4".

    Args:
        path: The recipe.
        over: "section.key=value,value,..." each.
        overrides: "section.key=value" each, for all members.
        out: Folder of the sweep.

    Raises:
        ConfigError: A recipe is not valid, or a key has no values or occurs twice.
    """
    axes = {key: written_values(listed) for key, _, listed in (o.partition("=") for o in over)}
    if not axes or len(axes) < len(over):
        raise ConfigError(
            "a sweep varies at least one setting, and each once",
            found=f"--over: {', '.join(over) or 'nothing'}",
            fix="peftkit sweep RECIPE --over method.rank=8,16 --over train.learning_rate=1e-4,3e-4",
        )
    if empty := [key for key, values in axes.items() if not key or not values]:
        fix = "Write KEY=VALUE,VALUE: method.rank=8,16,64"
        raise ConfigError(f"--over {empty[0]}: no values to try", fix=fix)
    members: dict[str, Member] = {}
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        name = "_".join(f"{key.rpartition('.')[2]}-{text}" for key, text in settings.items())
        name = re.sub(r"[^\w.-]+|\.\.+", "_", name).rstrip("_")
        if name in members:
            raise ConfigError("two members of the sweep are the same", found=name)
        members[name] = _member(name, path, settings, overrides, out)
    return [*members.values()]


def pick(
    path: str | Path, file: str | Path, overrides: Sequence[str] = (), *, out: Path
) -> list[Member]:
    """Return the members that a YAML file defines: {small: {method.rank: 8}, ...}.

    Raises:
        ConfigError: A recipe is not valid, or the file has another format.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    parsed = parse(text, lambda line: SourceLocation(str(file), line))
    by_name = parsed.data if isinstance(parsed.data, dict) and not parsed.problems else {}
    if not by_name or not all(isinstance(settings, dict) for settings in by_name.values()):
        fix = "Write a line for each: NAME: {method.rank: 8, train.learning_rate: 1e-4}"
        raise ConfigError(f"{file} does not name the members of a sweep", fix=fix)
    return [_member(str(name), path, values, overrides, out) for name, values in by_name.items()]


def _member(
    name: str, path: str | Path, settings: Mapping[str, object], overrides: Sequence[str], out: Path
) -> Member:
    """Return a member; its settings are YAML texts or values."""
    if not re.fullmatch(r"\w[\w.-]*", name) or ".." in name:  # a name that serve accepts too
        fix = "Use letters, digits, '_', '-' and single dots."
        raise ConfigError(f"'{name}' is not a valid name of a member and its folder", fix=fix)
    texts = {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
    changes = (f"{key}={text}" for key, text in texts.items())
    folder = f"train.output_dir={json.dumps(str(out / name))}"
    recipe = load(path, [*overrides, *changes, folder])
    if url := recipe.train.upload:  # each member to its own folder or repository
        url = f"{url}-{name}" if url.startswith("hf://") else f"{url.rstrip('/')}/{name}"
        recipe = recipe.model_copy(
            update={"train": recipe.train.model_copy(update={"upload": url})}
        )
    values = flat(recipe.model_dump(mode="json"))
    return Member(name, recipe, {key: values.get(key, text) for key, text in texts.items()})


def check_members(members: Sequence[Member]) -> Purpose:
    """Check that all members share one base; return the purpose for which it is loaded.

    Raises:
        ConfigError: Names the first setting that differs, and in which members.
    """
    if not 2 <= len(members) <= MAX_MEMBERS:
        size = f"This one has {len(members)}."
        raise ConfigError(f"a sweep has from 2 to {MAX_MEMBERS} members", found=size)
    if world_size() > 1:
        fix = "Start it without accelerate launch or torchrun."
        raise ConfigError("a sweep runs in one process", fix=fix)
    first = members[0].recipe
    purpose = first.task.resolve(first.data).purpose
    for member in members:
        recipe = member.recipe
        check_settings(recipe, 1)
        pairs = {f"base.{key}": (value, getattr(recipe.base, key)) for key, value in first.base}
        other = recipe.task.resolve(recipe.data).purpose
        pairs["the task's form of the base"] = purpose, replace(other, task=purpose.task)
        for key, (expected, value) in pairs.items():
            if value != expected:
                raise ConfigError(
                    f"members of a sweep share one base; {key} differs",
                    found=f"{members[0].name}: {expected}\n{member.name}: {value}",
                    fix="Run a sweep for each.",
                )
    return purpose


def sweep(
    members: Sequence[Member], out: str | Path, *, resume: bool = False, on_event: Listener = ignore
) -> list[Outcome]:
    """Train the members one after the other over one base.

    A failed member does not stop the others. An error before any member has taken a step ends the
    sweep, because it most likely concerns all of them.

    Args:
        members: From `grid` or `pick`.
        out: The folder of the sweep.
        resume: Continue the sweep in that folder; failed members run again.

    Returns:
        The members, best first: by eval loss, or without eval rows by training loss.

    Raises:
        ConfigError: The members have different bases.
        PeftkitError: From `peftkit.run.run`, before any member has taken a step.
        RunError: All members failed.
        Interrupted: SIGINT or SIGTERM arrived; all progress is saved.
    """
    purpose = check_members(members)
    out, on_event = Path(out), _without_repeats(on_event)
    outcomes = _outcomes_in(out, members, resume)
    waiting = [member for member in members if outcomes[member.name].state != "done"]
    for member in waiting:
        prepare_output(member.folder, resume=resume and member.has_checkpoints)
        check_services(member.recipe.train)
        check_target(member.recipe)
    for recipe in {m.recipe.method.model_dump_json(): m.recipe for m in waiting}.values():
        if not recipe.method.start_from:
            model, revision = recipe.base.model, recipe.base.revision
            check_fits(skeleton(model, revision=revision, purpose=purpose), recipe.method)
    base: Base | None = None
    with locked(out), ExitStack() as stack:
        locks = {member.name: stack.enter_context(ExitStack()) for member in members}

        def lock(member: Member) -> None:
            locks[member.name].enter_context(locked(writable_folder(member.folder)))

        for member in members:
            lock(member)
        _write(out, outcomes)
        for number, member in enumerate(waiting, 1):
            on_event(Stage(f"Preparing {member.name} ({number} of {len(waiting)})"))
            outcome = outcomes[member.name]
            listener = to_all(on_event, LiveReport(member.folder, on_event).on_event)
            try:
                if base is None:
                    release_memory()
                    with stopping_immediately("stopped before the base was loaded."):
                        plans = [resolve_plan(m.recipe, on_event) for m in waiting]
                        plan = next((p for p in plans if p.placement == "stream"), plans[-1])
                        base = open_base(member.recipe.base, purpose, plan, on_event=on_event)
                locks[member.name].close()  # the run locks its folder itself
                resumes = resume and member.has_checkpoints
                result = run(member.recipe, resume=resumes, base=base, on_event=listener)
            except Interrupted as error:
                text = f"the progress of all members of {out} is saved. Continue with --resume."
                raise Interrupted(error.signum, text) from None
            except PeftkitError as error:
                outcome.steps = read_history(member.folder).step if is_run(member.folder) else 0
                if not any(o.steps for o in outcomes.values()):
                    (out / SWEEP).unlink()
                    raise
                outcome.state, outcome.error = "failed", str(error)
                on_event(Notice(f"{member.name} failed; the sweep continues. {error}"))
            else:
                outcome.state, outcome.steps, outcome.seconds = "done", result.step, result.seconds
                outcome.loss, outcome.error = result.metrics["loss"], ""
                outcome.eval_loss = result.metrics.get("eval_loss")
                if member.recipe.data.eval is not None and outcome.eval_loss is None:
                    outcome.loss = None  # it diverged in its last step: ranked after the others
                outcome.metrics = _eval_metrics(result.metrics)
                outcome.best_metric = member.recipe.train.best_metric
            _write(out, outcomes)
            lock(member)
            has_tokens = member.recipe.base.new_tokens or member.recipe.method.start_from
            if has_tokens or outcome.state == "failed":
                base = None  # it has more tokens, or the failed run's adapter
        return _finish(out, outcomes, on_event)


def _eval_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of the eval rows, except the loss and what follows from it."""
    names = (n for n in metrics if n.startswith("eval_") and math.isfinite(metrics[n]))
    left_out = ("eval_loss", "eval_perplexity")
    return {name.removeprefix("eval_"): metrics[name] for name in names if name not in left_out}


def _without_repeats(on_event: Listener) -> Listener:
    """Emit equal notices and tables of several members once."""
    emitted: list[Event] = []

    def listener(event: Event) -> None:
        if event not in emitted:
            on_event(event)
        if isinstance(event, Notice | Table):
            emitted.append(event)

    return listener


def _outcomes_in(out: Path, members: Sequence[Member], resume: bool) -> dict[str, Outcome]:
    """Return the saved outcomes of members; refuse the folder of another sweep."""
    fresh = {m.name: Outcome(m.name, dict(m.settings), str(m.folder)) for m in members}
    if not (out / SWEEP).exists():
        if resume:
            raise OutputError(f"there is no sweep to resume in {out}", fix="Leave out --resume.")
        writable_folder(out)
        return fresh
    if not resume:
        fix = "Continue it (--resume), or choose another folder (--out DIR)."
        raise OutputError(f"{out} already holds a sweep", fix=fix)
    saved = {entry["name"]: Outcome(**entry) for entry in read_json(out / SWEEP)["members"]}
    if {name: o.settings for name, o in saved.items()} != {m.name: m.settings for m in members}:
        fix = "Resume it with its original settings, or choose another folder (--out DIR)."
        names = ", ".join(saved)
        raise OutputError(f"the sweep in {out} has other members", found=names, fix=fix)
    return fresh | {name: outcome for name, outcome in saved.items() if outcome.state == "done"}


def _write(out: Path, outcomes: Mapping[str, Outcome], best: str | None = None) -> None:
    entries = [asdict(outcome) for outcome in outcomes.values()]
    seeds = _over_seeds([*outcomes.values()])
    write_json({"members": entries, "best": best, "over_seeds": seeds}, out / SWEEP)
    settings = _keys(o.settings for o in outcomes.values())
    metrics = _keys(o.metrics for o in outcomes.values())
    fixed = ("state", "steps", "seconds", "loss", "eval_loss")
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(("name", *settings, *fixed, *(f"eval_{name}" for name in metrics)))
    for o in outcomes.values():
        chosen, scores = (o.settings.get(key, "") for key in settings), map(o.metrics.get, metrics)
        rows.writerow((o.name, *chosen, *(getattr(o, name) for name in fixed), *scores))
    write_text(table.getvalue(), out / CSV)


def _keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys of all mappings, each once, in the order of their first occurrence."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _over_seeds(outcomes: Sequence[Outcome]) -> list[Json]:
    """Return the mean and the standard deviation of members that differ in train.seed only.

    Returns:
        Of each group settings, num_seeds, and {metric: {"mean", "std"}}; std has the divisor n - 1.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.state == "done" and SEED in outcome.settings:
            others = {key: value for key, value in outcome.settings.items() if key != SEED}
            groups.setdefault(json.dumps(others, sort_keys=True), []).append(outcome)
    entries = []
    for settings, group in groups.items():
        if len(group) < 2:
            continue
        entry: Json = {"settings": json.loads(settings), "num_seeds": len(group)}
        for name in ("eval_loss", *group[0].metrics):
            values = [o.eval_loss if name == "eval_loss" else o.metrics.get(name) for o in group]
            numbers = [value for value in values if value is not None]
            if len(numbers) == len(group):
                entry[name] = {"mean": statistics.mean(numbers), "std": statistics.stdev(numbers)}
        entries.append(entry)
    return entries


def _finish(out: Path, outcomes: Mapping[str, Outcome], on_event: Listener) -> list[Outcome]:
    """Write the report of all members, copy the best adapter, and print the table."""
    ranked = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
    folders = [outcome.folder for outcome in ranked if is_run(Path(outcome.folder))]
    try:
        on_event(Saved("report", write_report(folders, out / REPORT)))
    except Exception as error:  # a failed report does not fail the sweep
        on_event(Notice(f"{REPORT} was not written: {error}"))
    best = ranked[0]
    if best.state == "failed":
        fix = f"See {out}/{SWEEP}."
        raise RunError("every member of the sweep failed", found=best.error, fix=fix)
    _write(out, outcomes, best.name)
    ignored = shutil.ignore_patterns("checkpoints", "metrics.jsonl", LOCKS)
    files = {*ADAPTER_FILES, *RECORDS}
    with new_folder(out / BEST, last=CONFIG, replaced=files.__contains__) as folder:
        shutil.copytree(best.folder, folder, ignore=ignored, dirs_exist_ok=True)
    keys = _keys(outcome.settings for outcome in ranked)
    names = [key.rpartition(".")[2] for key in keys]
    metrics = _keys(o.metrics for o in ranked)[:MAX_METRICS]
    if (chosen := best.best_metric) in best.metrics and chosen not in metrics:
        metrics = [chosen, *metrics[:-1]]
    measured = (f"eval {metric_name(name)}" for name in metrics)
    columns = ("member", *names, *measured)
    columns += ("eval loss, last", loss_name(), "steps", "time", "state")
    rows = []
    for o in ranked:
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (o.eval_loss, o.loss))
        settings = (str(o.settings.get(key, "")) for key in keys)
        scores = (short(o.metrics.get(name)) for name in metrics)
        rows.append(
            (o.name, *settings, *scores, *losses, str(o.steps), duration(o.seconds), o.state)
        )
    on_event(Table("The sweep, best first", columns, tuple(rows)))
    if groups := _over_seeds(ranked):
        compared = [name for name in ("eval_loss", *metrics) if name in groups[0]]
        cells = [
            (
                ", ".join(f"{key}={value}" for key, value in group["settings"].items()) or "all",
                str(group["num_seeds"]),
                *(f"{g['mean']:.4g} +- {g['std']:.2g}" for g in map(group.get, compared) if g),
            )
            for group in groups
        ]
        heads = ("settings", "seeds", *map(metric_name, compared))
        on_event(Table("Mean and standard deviation over seeds", heads, tuple(cells)))
    on_event(Saved("best adapter", out / BEST))
    return ranked
