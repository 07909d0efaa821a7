"""The parts of a report below its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Any

from peftkit.report.history import History
from peftkit.report.html import code, histogram, paragraph, table, text
from peftkit.train.checkpoints.identity import flat

MAX_SAMPLE_STEPS = 12


def _some(steps: Sequence[int]) -> list[int]:
    """Return the first and the last step, and some between."""
    last = len(steps) - 1
    places = {n * last // (MAX_SAMPLE_STEPS - 1) for n in range(MAX_SAMPLE_STEPS)}
    return [steps[place] for place in sorted(places)]


def answers(run: History) -> str:
    """Return the best and the worst answer of steps that learnt from answers."""
    if not run.answers:
        return ""
    rows = []
    for step in _some(sorted(run.answers)):
        best, worst = run.answers[step]
        for line in (best, worst) if worst is not best else (best,):
            parts = line.get("parts") or {}
            told = parts.items() if len(parts) > 1 else ()
            worth = [f"{line['reward']:.4g}", *(f"{name} {_figure(v)}" for name, v in told)]
            asked, said = str(line.get("prompt", ""))[-300:], str(line.get("completion", ""))
            rows.append((f"{step:,}", "\n".join(worth), asked, said))
    note = "Of each step shown the best and the worst: what a reward really rewards is seen here."
    columns = ("step", "reward", "prompt", "answer")
    return f"<h2>Answers and their rewards</h2>{paragraph(note)}{table(columns, rows)}"


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def samples(run: History) -> str:
    """Return what the model answered to the same prompts, before, during and after."""
    steps = sorted({line["step"] for line in run.samples})
    if not steps:
        return ""
    shown = set(_some(steps))
    prompts: dict[str, list[Mapping[str, Any]]] = {}
    for line in run.samples:
        if line["step"] in shown:
            prompts.setdefault(str(line["prompt"]), []).append(line)
    parts = ["<h2>Samples</h2>"]
    for prompt, lines in prompts.items():
        reference = lines[-1].get("reference")
        rows = [("reference", str(reference))] if reference else []
        for said in sorted(lines, key=lambda line: line["step"]):
            when = "before" if said["step"] == 0 else f"step {said['step']:,}"
            rows.append((when, str(said.get("completion", ""))))
        parts.append(f"{code(prompt)}<blockquote>{table(('', ''), rows)}</blockquote>")
    return "\n".join(parts)


def tasks(run: History) -> str:
    """Return what base and adapter reach in tasks of lm-evaluation-harness."""
    columns = ("task", "metric", "base", "adapter", "standard error", "rows")
    rows = [map(_figure, dict(score).values()) for score in run.scores]
    return f"<h2>Tasks</h2>{table(columns, [list(row) for row in rows])}" if rows else ""


def data(run: History) -> str:
    """Return what became of the rows, how long they are, and one as the loss sees it."""
    parts = [_tables(run, of_files=True)]
    for name, bars in run.facts.lengths.items():
        label = f"Lengths of the {name} rows, in tokens"
        parts.append(f"<h3>{text(label)}</h3>{histogram(bars, label)}" if bars else "")
    parts.append(_row(run) if run.facts.row else "")
    return "\n".join(["<h2>Data</h2>", *parts]) if any(parts) else ""


def _row(run: History) -> str:
    pieces = run.facts.row
    if {kind for kind, _ in pieces if kind} <= {"learnt"}:
        marked = (f"<mark>{text(p)}</mark>" if kind else text(p) for kind, p in pieces)
        shown = f"<pre>{''.join(marked)}</pre>"
        note = "The loss is on what is marked; the rest is context."
    else:
        shown = table(("", "text"), pieces)
        note = "Its parts, as the task names them."
    title = text(f"A row as the loss sees it: {run.facts.row_source}")
    return f"<h3>{title}</h3>{shown}{paragraph(note)}"


def model(run: History) -> str:
    """Return the audit of the base and what is trained beside it."""
    told, paths = _tables(run, of_files=False), run.started.get("paths")
    how = paragraph(f"Computed by: {paths}.") if paths else ""
    return f"<h2>Base and adapter</h2>{told}{how}" if told or how else ""


def _tables(run: History, *, of_files: bool) -> str:
    return "\n".join(
        f"<h3>{text(known.title)}</h3>{table(known.columns, known.rows)}"
        for known in run.facts.tables
        if bool(known.source) is of_files
    )


def recipe(run: History) -> str:
    """Return the recipe."""
    shown = run.facts.recipe_yaml
    return f"<h2>Recipe</h2>{code(shown)}" if shown else ""


def differing(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return of each recipe the settings in which not all agree; of an empty one nothing."""
    settings = [shown(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for known in settings for key in known if key != "train.output_dir")
    told = [key for key in keys if len({known.get(key) for known in settings if known}) > 1]
    return [{key: known[key] for key in told if key in known} for known in settings]


def differences(runs: Sequence[History]) -> str:
    """Return the settings in which runs differ, a column each."""
    settings = differing([run.facts.recipe for run in runs])
    keys = dict.fromkeys(key for known in settings for key in known)
    if not keys:
        return paragraph("The recipes are the same.")
    rows = [(key, *(known.get(key, "-") for known in settings)) for key in keys]
    return table(("setting", *(run.name for run in runs)), rows)


def shown(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested settings as one mapping, names joined by dots, values as text."""
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in flat(values).items()}
    return texts | {n: f"{v:.6g}" for n, v in flat(values).items() if isinstance(v, float)}


def machine(run: History) -> str:
    """Return where it was trained, with which versions, and what identifies its parts."""
    rows = shown(run.facts.machine).items()
    return f"<h2>Machine, versions, hashes</h2>{table(('', ''), rows)}" if rows else ""


def notices(run: History) -> str:
    """Return the notices of the run, repeated ones once."""
    told = [*((0, notice) for notice in run.facts.notices), *run.notices]
    rows = []
    for notice, same in groupby(told, key=lambda pair: pair[1]):
        step, _ = next(same)
        rows.append(("before" if step == 0 else f"step {step:,}", notice))
    return f"<h2>Notices</h2>{table(('', ''), rows)}" if rows else ""


def commands(run: History, title: str = "h2") -> str:
    """Return what to type next."""
    folder = quote(str(run.folder))
    lines = [run.facts.command.replace("{folder}", folder)]
    if run.state() != "finished":
        lines = [f"peftkit train RECIPE.yaml --resume --out {folder}"]
    else:
        if run.facts.mergeable:
            lines.append(f"peftkit merge {folder} --out {quote(f'{run.folder}-merged')}")
        file, again = quote(str(Path(run.folder, "recipe.yaml"))), quote(f"{run.folder}-again")
        lines.append(f"peftkit train {file} --out {again}")
    joined = "\n".join(filter(None, lines))
    return f"<{title}>Next</{title}>{code(joined)}"
