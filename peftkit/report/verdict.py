"""A run in one sentence, and what looks wrong with it, the worst first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from peftkit.report.figures import duration
from peftkit.report.history import History

RISEN, MANY_CUT = 1.02, 0.1
"""Eval loss this many times its best has risen; this share of rows that are cut is worth a word."""
MIN_STEPS = 20
"""Fewer say nothing of flat curves."""


def verdict(run: History) -> str:
    """Return what was learnt from what, with the loss and the metrics before and after."""
    who = _short_name(_at(run, "base", "model")) or "The model"
    task = _at(run, "task", "type").replace("_", " ") or "its task"
    does = "learns" if run.state() == "running" else "learnt"
    rows = run.started.get("num_rows")
    source = f" from {rows:,} rows" if rows else ""
    if data := _at(run, "data", "train"):
        source += f" of {_short_name(data)}"
    if run.step == 0:
        return f"{who} {does} {task}{source}: no step is done yet."
    of_all = f" of {run.num_steps:,}" if run.step < run.num_steps else ""
    took = f"{run.step:,}{of_all} steps ({duration(run.seconds)})"
    return f"{who} {does} {task}{source} in {took}: {'; '.join(_changes(run))}."


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
    return [text for check in (_unfinished, _nothing, _rising, _rows) for text in check(run)]


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
    is_over = run.step >= MIN_STEPS and run.done is not None
    if norms and not any(norms):
        yield "The adapter changes nothing: every gradient is zero."
    elif len(evals) > 1 and max(evals) - min(evals) <= 1e-6 * abs(evals[0]):
        yield "The adapter changes nothing: the eval loss is the same at every evaluation."
    elif "reward" in run.figures:  # the loss of a policy says nothing: it is near 0 all the time
        rewards = run.figures["reward"].smoothed().values
        if is_over and rewards[-1] <= rewards[0]:
            yield (
                f"The reward did not rise ({rewards[0]:.4g} → {rewards[-1]:.4g}): look at the "
                "answers below, the learning rate, and how many steps taught."
            )
    elif is_over:
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
        fix = "Try train.keep_best, train.early_stopping or fewer epochs."
        if _at(run, "train", "keep_best") == "True":
            fix = "The adapter has the best step's weights."
        yield (
            f"The eval loss rises since step {step:,} ({low:.4g} → {series.values[-1]:.4g}): the "
            f"model is overfitting. {fix}"
        )


def _rows(run: History) -> Iterator[str]:
    for table in run.facts.tables:
        read, cut, dropped = (table.counts.get(f"num_{n}", 0) for n in ("read", "cut", "dropped"))
        if cut and cut >= MANY_CUT * read:
            yield f"{cut:,} of {read:,} rows of {table.source} are cut: raise data.max_length."
        if dropped:
            yield (
                f"{dropped:,} of {read:,} rows of {table.source} have nothing to learn and were "
                "dropped."
            )


def _at(run: History, section: str, name: str) -> str:
    """Return a setting of the recipe as text; of several files how many."""
    values = run.facts.recipe.get(section)
    found = values.get(name) if isinstance(values, dict) else None
    if isinstance(found, list):
        return f"{len(found)} files"
    return "" if found is None else str(found)


def _short_name(name: str) -> str:
    """Return a model's or a file's name without its folders; a hub id stays whole."""
    path = Path(name)
    return path.name if path.is_absolute() or path.suffix or len(path.parts) > 2 else name
