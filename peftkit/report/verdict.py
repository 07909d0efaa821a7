"""A run in one sentence, and what looks wrong with it, the worst first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peftkit.report.figures import duration
from peftkit.report.history import History

RISEN, SPIKE, MANY_CUT = 1.02, 10.0, 0.1
"""Eval loss this many times its best has risen; a gradient norm this many times the median is a
spike; this share of rows that are cut is worth a word."""
ROW_COUNTS = ("num_read", "num_cut", "num_dropped")
AROUND = 5
"""Steps before and after one that say what is usual there."""
MIN_STEPS = 20
"""Fewer say nothing of spikes, flat curves and slowing down."""


def verdict(run: History) -> str:
    """Return what was learnt from what, with the loss and the metrics before and after."""
    base = _short_name(_at(run.recipe, "base", "model"))
    task = _at(run.recipe, "task", "type").replace("_", " ")
    rows = run.started.get("num_rows")
    files = run.recipe.get("data", {}).get("train") if run.recipe else ""
    data = f"{len(files)} files" if isinstance(files, list) else _short_name(str(files or ""))
    who = base or "The model"
    subject = f"{who} learns {task or 'its task'}" if run.state() == "running" else ""
    subject = subject or f"{who} learnt {task or 'its task'}"
    source = f" from {rows:,} rows" if isinstance(rows, int) else ""
    source += f" of {data}" if data else ""
    if run.step == 0:
        return f"{subject}{source}: no step is done yet."
    took = f"{run.step:,} of {run.num_steps:,} steps" if run.step < run.num_steps else ""
    took = took or f"{run.step:,} steps"
    changes = "; ".join(_changes(run))
    return f"{subject}{source} in {took} ({duration(run.seconds)}): {changes}."


def _changes(run: History) -> Iterator[str]:
    loss = run.curves["loss"].smoothed()
    yield f"loss {loss.values[0]:.4g} → {loss.values[-1]:.4g}"
    for name, series in run.evals.items():
        first, last = series.values[0], series.values[-1]
        text = f"{first:.4g} → {last:.4g}" if len(series) > 1 else f"{last:.4g}"
        if name != "perplexity":  # the loss in other words
            yield f"eval {name.replace('_', ' ')} {text}"


def warnings(run: History) -> list[str]:
    """Return what looks wrong, the worst first; nothing where all is well."""
    checks = (_unfinished, _nothing, _rising, _spikes, _rows, _slowing, _torn)
    return [text for check in checks for text in check(run)]


def _unfinished(run: History) -> Iterator[str]:
    found = run.diagnosis
    if found and run.done is None:
        where = f", first in {found['module']}" if found.get("module") else ""
        yield (
            f"Step {found.get('step')} had a loss of {found.get('loss')} and a gradient norm of "
            f"{found.get('grad_norm')}{where}: the run was stopped there."
        )
    elif run.state() in ("stopped", "failed"):
        why = run.why.splitlines()[0].rstrip(".") if run.why else ""
        yield (
            f"The run {run.state()} after step {run.step:,} of {run.num_steps:,}"
            f"{f': {why}' if why else ''}. Continue it with peftkit train --resume."
        )


def _nothing(run: History) -> Iterator[str]:
    norms, evals = run.curves["grad_norm"].values, run.eval_loss.values
    if norms and not any(norms):
        yield "The adapter changes nothing: every gradient is zero."
    elif len(evals) > 1 and max(evals) - min(evals) <= 1e-6 * abs(evals[0]):
        yield "The adapter changes nothing: the eval loss is the same at every evaluation."
    elif "reward" in run.figures:  # the loss of a policy says nothing: it is near 0 all the time
        rewards = run.figures["reward"].smoothed().values
        if run.step >= MIN_STEPS and run.done is not None and rewards[-1] <= rewards[0]:
            yield (
                f"The reward did not rise ({rewards[0]:.4g} → {rewards[-1]:.4g}): look at the "
                "answers below, the learning rate, and how many steps taught."
            )
    elif run.step >= MIN_STEPS and run.done is not None:
        loss = run.curves["loss"].smoothed().values
        if loss and loss[-1] > 0.98 * loss[0]:
            yield (
                f"The loss hardly fell ({loss[0]:.4g} → {loss[-1]:.4g}): look at the learning "
                "rate, the targets, and at a row as the loss sees it."
            )


def _rising(run: History) -> Iterator[str]:
    series = run.eval_loss
    step, low = series.best() or (0, 0.0)
    if series and step < series.steps[-1] and series.values[-1] > RISEN * low:
        kept = _at(run.recipe, "train", "keep_best") == "True"
        yield (
            f"The eval loss rises since step {step:,} ({low:.4g} → {series.values[-1]:.4g}): the "
            "model is overfitting. "
            + (
                "The adapter has the best step's weights."
                if kept
                else "Try train.keep_best, train.early_stopping or fewer epochs."
            )
        )


def _spikes(run: History) -> Iterator[str]:
    series = run.curves["grad_norm"]
    if len(series) < MIN_STEPS:
        return
    median = sorted(series.values)[len(series) // 2]
    found = []
    for at, value in enumerate(series.values):
        if value > SPIKE * median > 0:  # and above its neighbours too: at first norms are large
            around = sorted(series.values[max(0, at - AROUND) : at + AROUND + 1])
            if value > SPIKE * around[len(around) // 2]:
                found.append(series.steps[at])
    if found:
        many = "1 step" if len(found) == 1 else f"{len(found):,} steps"
        yield (
            f"The gradient norm spikes: {many} above {SPIKE:.0f} times the usual "
            f"({median:.3g}), the first at step {found[0]:,}."
        )


def _rows(run: History) -> Iterator[str]:
    for where, (read, cut, dropped) in files_read(run):
        if cut and cut >= MANY_CUT * read:
            yield f"{cut:,} of {read:,} rows of {where} are cut: raise data.max_length."
        if dropped:
            yield f"{dropped:,} of {read:,} rows of {where} have nothing to learn and were dropped."


def _slowing(run: History) -> Iterator[str]:
    values = run.curves["tokens_per_second"].smoothed().values
    if len(values) >= 5 * MIN_STEPS:
        usual = sorted(values)[len(values) // 2]
        if values[-1] < 0.5 * usual:
            yield f"It became slow: {values[-1]:,.0f} tokens/s in the end, {usual:,.0f} usually."


def _torn(run: History) -> Iterator[str]:
    if run.num_torn:
        yield f"{run.num_torn:,} lines of metrics.jsonl could not be read and are left out."


def files_read(run: History) -> Iterator[tuple[str, list[int]]]:
    """Yield each file of rows that a run read, with its ROW_COUNTS, as run.json has them."""
    tables: Any = run.facts.get("tables")
    for table in tables if isinstance(tables, list) else ():
        counts = table.get("counts") if isinstance(table, dict) else None
        known = counts if isinstance(counts, dict) else {}
        numbers = [n for name in ROW_COUNTS if isinstance(n := known.get(name), int)]
        if len(numbers) == len(ROW_COUNTS):
            yield str(table.get("source")), numbers


def _at(values: object, *names: str) -> str:
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return "" if values is None else str(values)


def _short_name(name: str) -> str:
    """Return a model's or a file's name without its folders; a hub id stays whole."""
    path = Path(name)
    return path.name if path.is_absolute() or path.suffix or len(path.parts) > 2 else name
