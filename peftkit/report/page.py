"""The report of one or several runs, as a self-contained HTML file.

`peftkit report` writes it for any run; `LiveReport` updates it during a run.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Any

from peftkit.events import EvalDone, Event, Listener, Notice, RunStopped, Sampled, Saved, StepDone
from peftkit.figures import count, duration, loss_name, short, size
from peftkit.files.disk import write_text
from peftkit.files.strict_json import Json
from peftkit.report.chart import charts, code, histogram, paragraph, render_chart, table, text
from peftkit.report.history import (
    History,
    as_texts,
    differing,
    read_histories,
    row_of,
    sample_scores,
)

REPORT = "report.html"
REFRESH_SECONDS = 30
"""Interval at which a browser reloads the report of an active run."""
SHARE = 0.02
"""Maximum share of the run's time for writing its report."""
MAX_SAMPLE_STEPS = 12
STYLE, SCRIPT = (
    files("peftkit.report").joinpath(name).read_text(encoding="utf-8")
    for name in ("report.css", "report.js")
)


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the report of runs as one HTML file, and return its path.

    Args:
        runs: Folders of the runs; the recipes of several runs are compared.
        out: The file to write.

    Raises:
        DataError: A folder holds no run.
        OutputError, RunError: The file cannot be written.
    """
    write_text(page(read_histories(runs)), Path(out))
    return Path(out)


class LiveReport:
    """Listener that writes a run's report after evaluations, samples and saves, and at its end.

    After a failure it emits one Notice and stops writing the report; the run continues.

    Args:
        folder: The folder of the run.
        on_event: Receives the Notice.
    """

    def __init__(
        self, folder: Path, on_event: Listener, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.folder, self._report, self._clock = folder, on_event, clock
        self._is_due = self._is_broken = False
        self._spent, self._began = 0.0, clock()

    def on_event(self, event: Event) -> None:
        """Write the report when the run ends, or at a step after a relevant event."""
        if isinstance(event, RunStopped) or (isinstance(event, Saved) and event.kind == "adapter"):
            self._write(event)
        elif isinstance(event, EvalDone | Sampled | Saved):
            self._is_due = (
                True  # at the next step, since metrics.jsonl does not have this event yet
            )
        elif (
            isinstance(event, StepDone)
            and self._is_due
            and self._spent <= SHARE * (self._clock() - self._began)
        ):
            self._write(event)

    def _write(self, event: Event) -> None:
        if self._is_broken:
            return
        self._is_due, began = False, self._clock()
        try:
            (run,) = read_histories([self.folder])
            run.add({"event": type(event).__name__, **asdict(event)})
            write_text(page([run]), self.folder / REPORT)
        except Exception as error:  # a report must not stop the run
            self._is_broken = True
            self._report(Notice(f"{REPORT} is no longer written: {error}"))
        self._spent += self._clock() - began


def page(runs: Sequence[History]) -> str:
    """Return the report as HTML that runs only peftkit's script and makes no requests."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    policy += f"script-src 'sha256-{digest}'"
    refresh = ""
    if len(runs) == 1 and runs[0].state() == "running":
        refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">\n'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{text(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}<title>{text(title)} - peftkit</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
{body}
<script>{SCRIPT}</script>
</body>
</html>
"""


def _one(run: History) -> str:
    state, paths = run.state(), run.started.get("paths")
    computed_by = paragraph(f"Computed by: {paths}.") if paths else ""
    head = f'<h1>{text(run.name)} <span class="state {state.replace(" ", "-")}">{state}</span></h1>'
    sections = [
        ("Curves", _curves([run])),
        ("Labels", labels_section(run.labels) if run.labels else ""),
        ("Tasks", _scores(run) if run.scores else ""),
        ("Samples", _samples(run) if run.samples else ""),
        ("Completions and their rewards", _answers(run) if run.answers else ""),
        ("Data", _tables(run, of_files=True) + _lengths(run) + _row_of_the_loss(run)),
        ("Base and adapter", _tables(run, of_files=False) + computed_by),
        ("Recipe", code(run.facts.recipe_yaml)),
        ("Machine, versions, hashes", _machine(run)),
        ("Notices", _notices(run)),
        ("Next", _next_commands(run)),
    ]
    written = time.strftime("Written by peftkit, %Y-%m-%d %H:%M.", time.localtime())
    return head + _end(run) + _tiles(run) + _joined(sections) + paragraph(written)


def _several(runs: Sequence[History]) -> str:
    rows = []
    for run in runs:
        row = row_of(run)
        losses = map(short, (row.loss, row.best_eval_loss, row.eval_loss))
        rows.append((row.run, row.state, f"{row.step:,}", *losses, duration(row.seconds)))
    columns = ("run", "state", "steps", loss_name(), "eval loss, best", "eval loss, last", "time")
    sections = [("Differences of the recipes", _differences(runs)), ("Curves", _curves(runs))]
    sections += [(run.name, _end(run) + _next_commands(run)) for run in runs]
    return f"<h1>{len(runs)} runs</h1>{table(columns, rows, numbers=True)}{_joined(sections)}"


def _joined(sections: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"<h2>{text(title)}</h2>{part}" for title, part in sections if part)


def _differences(runs: Sequence[History]) -> str:
    settings = differing(runs)
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    rows = [(key, *(of_run.get(key, "-") for of_run in settings)) for key in keys]
    compared = table(("setting", *(run.name for run in runs)), rows)
    return compared or paragraph("The recipes are the same.")


def _end(run: History) -> str:
    """Return a warning if the run ended before its last step; else ""."""
    if run.state() not in ("stopped", "failed"):
        return ""
    reason = run.end.get("text", "it stopped writing")
    sentence = f"The run {run.state()} after step {run.step:,} of {run.num_steps:,}: {reason}"
    return paragraph(sentence, "warning")


def _tiles(run: History) -> str:
    trainable, total = (run.started.get(f"num_{name}", 0) for name in ("trainable", "parameters"))
    row, peak = row_of(run), max(run.curves["peak_bytes"].values(), default=0.0)
    tiles = {
        "steps": f"{run.step:,} of {run.num_steps:,}" if run.num_steps else "",
        "time": duration(run.seconds) if run.step else "",
        loss_name(run.step): short(row.loss),
        f"best eval, step {row.best_step}": short(row.best_eval_loss),
        "trained": f"{count(trainable)} ({100 * trainable / total:.2f}\u202f%)" if total else "",
        "rows": _rows(run),
        "tokens": count(run.num_tokens) if run.num_tokens else "",
        "peak memory": size(peak) if peak else "",
        "device": run.started.get("device", ""),
    }
    elements = (
        f"<div><span>{a}</span><b>{text(b)}</b></div>"
        for a, b in tiles.items()
        if b not in ("", "-")
    )
    return f'<div class="tiles">{"".join(elements)}</div>'


def _rows(run: History) -> str:
    if "num_rows" not in run.started:
        return ""
    epochs = f", {run.epoch:.2f} epochs" if run.step else ""
    return f"{run.started['num_rows']:,}{epochs}"


def _curves(runs: Sequence[History]) -> str:
    figures = "".join(map(render_chart, charts(runs))) or paragraph("No step is done yet.")
    seams = ", ".join(f"{step:,}" for step in runs[0].seams) if len(runs) == 1 else ""
    note = paragraph(f"Resumed after step {seams} (dotted lines).") if seams else ""
    return f'<div class="charts">\n{figures}</div>{note}'


def _scores(run: History) -> str:
    columns = ("task", "metric", "base", "adapter", "standard error", "rows")
    keys = ("task", "metric", "base", "adapter", "stderr", "num_rows")
    return table(columns, [[_cell(score.get(key)) for key in keys] for score in run.scores])


def _cell(value: object) -> str:
    return short(value) if isinstance(value, float | None) else str(value)


def _samples(run: History) -> str:
    """Return completions of the same prompts before, during and after training."""
    steps = _evenly_spaced(sorted({line["step"] for line in run.samples}))
    prompts: dict[str, list[Json]] = {}
    for line in sorted(run.samples, key=lambda line: int(line["step"])):
        if line["step"] in steps:
            prompts.setdefault(str(line["prompt"]), []).append(line)
    parts = []
    for prompt, lines in prompts.items():
        reference = lines[-1].get("reference")
        rows = [("reference", reference)] if reference else []
        for line in lines:
            rows.append((_when(line["step"]), str(line.get("completion", ""))))
        parts.append(f"{code(prompt)}<blockquote>{table(('', ''), rows)}</blockquote>")
    scores = [(_when(step), score) for step, score in sample_scores(run.samples).items()]
    return "\n".join([table(("", "correct"), scores), *parts])


def _when(step: int) -> str:
    return f"step {step:,}" if step else "before"


def _answers(run: History) -> str:
    """Return the completions with the highest and the lowest reward of some steps."""
    rows = []
    for step in _evenly_spaced(sorted(run.answers)):
        best, worst = run.answers[step]
        for line in (best, worst) if worst is not best else (best,):
            parts = line.get("parts") or {}
            by_name = [f"{name} {_cell(v)}" for name, v in parts.items() if len(parts) > 1]
            rewards = "\n".join([short(line["reward"]), *by_name])
            prompt, completion = str(line.get("prompt", ""))[-300:], str(line.get("completion", ""))
            rows.append((f"{step:,}", rewards, prompt, completion))
    columns = ("step", "reward", "prompt", "best and worst completion of the step")
    return table(columns, rows)


def _evenly_spaced(steps: Sequence[int]) -> list[int]:
    """Return up to MAX_SAMPLE_STEPS evenly spaced steps, with the first and the last."""
    last = len(steps) - 1
    places = {n * last // (MAX_SAMPLE_STEPS - 1) for n in range(MAX_SAMPLE_STEPS)}
    return [steps[place] for place in sorted(places)] if steps else []


def _tables(run: History, *, of_files: bool) -> str:
    tables = [t for t in run.facts.tables if bool(t.source) is of_files]
    return "".join(f"<h3>{text(t.title)}</h3>{table(t.columns, t.rows)}" for t in tables)


def _lengths(run: History) -> str:
    labels = {f"Lengths of the {n} rows, in tokens": bars for n, bars in run.facts.lengths.items()}
    return "".join(
        f"<h3>{text(label)}</h3>{histogram(bars, label)}" for label, bars in labels.items() if bars
    )


def _row_of_the_loss(run: History) -> str:
    spans = run.facts.row
    if not spans:
        return ""
    body, note = table(("", "text"), spans), "The fields of the row, by the task's names."
    if {kind for kind, _ in spans if kind} <= {"learnt"}:
        marked = (f"<mark>{text(span)}</mark>" if kind else text(span) for kind, span in spans)
        body = f"<pre>{''.join(marked)}</pre>"
        note = "The loss is computed on the marked text; the rest is context."
    title = text(f"A training row: {run.facts.row_source}")
    return f"<h3>{title}</h3>{body}{paragraph(note)}"


def _machine(run: History) -> str:
    facts = as_texts({name: fact for name, fact in run.facts.machine.items() if fact is not None})
    return table(("", ""), [(name.removeprefix("versions."), fact) for name, fact in facts.items()])


def _notices(run: History) -> str:
    """Return the notices of the run without repetitions."""
    notices = [*((0, notice) for notice in run.facts.notices), *run.notices]
    rows = []
    for notice, same in groupby(notices, key=lambda pair: pair[1]):
        step, _ = next(same)
        rows.append((_when(step), notice))
    return table(("", ""), rows)


def _next_commands(run: History) -> str:
    folder = str(run.folder)
    is_saved = any((run.folder / "checkpoints").glob("step-*"))
    lines = [f"peftkit train RECIPE.yaml {'--resume ' * is_saved}--out {quote(folder)}"]
    if run.state() == "finished":
        lines = [run.facts.command.replace("{folder}", quote(folder))]
        if run.facts.mergeable:
            lines.append(f"peftkit merge {quote(folder)} --out {quote(f'{folder}-merged')}")
        recipe, again = quote(str(run.folder / "recipe.yaml")), quote(f"{folder}-again")
        lines.append(f"peftkit train {recipe} --out {again}")
    return code("\n".join(filter(None, lines)))


SHARES = ("precision", "recall", "f1")


def labels_section(report: Mapping[str, Any]) -> str:
    """Return the metrics of each label and the confusion matrix; "" for other tasks.

    Args:
        report: The last line of the event ClassReport in metrics.jsonl.
    """
    labels: Mapping[str, Mapping[str, float]] = report.get("labels") or {}
    rows = [
        (name, *(f"{metrics[share]:.3f}" for share in SHARES), f"{metrics['rows']:,}")
        for name, metrics in labels.items()
    ]
    parts = [table(("label", "precision", "recall", "F1", "rows"), rows, numbers=True)]
    if confusion := report.get("confusion"):
        title = "Confusion matrix: rows are true labels, columns are predicted labels"
        parts += [f"<h3>{title}</h3>", _heat_map([*labels], confusion)]
    return "".join(parts)


def _heat_map(labels: Sequence[str], confusion: Sequence[Sequence[int]]) -> str:
    """Return a table whose cells are shaded by their share of the true label's rows."""
    head = "".join(f"<th>{text(name)}</th>" for name in labels)
    body = []
    for row, (true, numbers) in enumerate(zip(labels, confusion, strict=True)):
        total = max(sum(numbers), 1)
        cells = (
            f'<td class="{"hit" if row == column else "miss"}" style="--share:{n / total:.0%}" '
            f'title="{text(f"{true} as {labels[column]}: {n / total:.0%}")}">{n:,}</td>'
            for column, n in enumerate(numbers)
        )
        body.append(f"<tr><th>{text(true)}</th>{''.join(cells)}</tr>")
    grid = f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table class="confusion">{grid}</table></div>'
