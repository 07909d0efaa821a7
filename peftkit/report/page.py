"""The report of one run or of several, as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from peftkit.report import sections
from peftkit.report.chart import charts
from peftkit.report.figures import count, duration, size
from peftkit.report.history import History, read_histories
from peftkit.report.html import drawn, paragraph, table, text
from peftkit.report.runs import row_of
from peftkit.report.verdict import verdict, warnings

REFRESH_SECONDS = 30
"""How often a browser reloads the report of a run that is going on."""
STYLE, SCRIPT, LIVE = (
    files("peftkit.report").joinpath(name).read_text(encoding="utf-8")
    for name in ("report.css", "report.js", "live.js")
)


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the report of runs as one HTML file, and return its path.

    Args:
        runs: Their folders; the recipes of several are compared.
        out: The file to write.

    Raises:
        DataError: A folder holds no run.
        OutputError, RunError: The file cannot be written.
    """
    from peftkit.files.disk import write_text  # torch comes with it

    write_text(page(read_histories(runs)), Path(out))
    return Path(out)


def page(runs: Sequence[History], *, live: bool = False) -> str:
    """Return the report as HTML, with no script but ours and no request to anywhere.

    Args:
        live: It asks its server for what is new; else a file that a browser loads again.
    """
    one = len(runs) == 1
    title = runs[0].name if one else f"{len(runs)} runs"
    again = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">\n'
    is_running = one and runs[0].state() == "running"
    script = SCRIPT + LIVE if live else SCRIPT
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'" + ("; connect-src 'self'" if live else "")
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{text(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
{again if is_running and not live else ""}<title>{text(title)} - peftkit</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
{_one(runs[0]) if one else _several(runs)}
<script>{script}</script>
</body>
</html>
"""


def _one(run: History) -> str:
    state = run.state()
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    parts = [
        f'<h1>{text(run.name)} <span class="state {state.replace(" ", "-")}">{state}</span></h1>',
        paragraph(verdict(run), "verdict"),
        *(paragraph(warning, "warning") for warning in warnings(run)),
        _tiles(run),
        "<h2>Curves</h2>",
        _curves([run]),
        sections.tasks(run),
        sections.samples(run),
        sections.answers(run),
        sections.data(run),
        sections.model(run),
        sections.recipe(run),
        sections.machine(run),
        sections.notices(run),
        sections.commands(run),
        paragraph(f"Written by peftkit, {written}."),
    ]
    return "\n".join(filter(None, parts))


def _several(runs: Sequence[History]) -> str:
    rows = []
    for run in runs:
        row = row_of(run)
        losses = (row.loss, row.best_eval_loss, row.eval_loss)
        told = ("-" if loss is None else f"{loss:.4g}" for loss in losses)
        rows.append((row.run, row.state, f"{row.step:,}", *told, duration(row.seconds)))
    columns = ("run", "state", "steps", "loss", "eval loss, best", "eval loss, last", "time")
    links = (f'<a href="#run-{n}">{text(run.name)}</a>' for n, run in enumerate(runs))
    parts = [
        f"<h1>{len(runs)} runs</h1>",
        table(columns, rows, numbers=True),
        f"<p>{' · '.join(links)}</p>",
        "<h2>What differs</h2>",
        sections.differences(runs),
        "<h2>Curves</h2>",
        _curves(runs),
    ]
    for number, run in enumerate(runs):
        parts += [
            f'<h2 id="run-{number}">{text(run.name)}</h2>',
            paragraph(verdict(run), "said"),
            *(paragraph(warning, "warning") for warning in warnings(run)),
            sections.commands(run, title="h3"),
        ]
    return "\n".join(parts)


def _curves(runs: Sequence[History]) -> str:
    figures = "".join(drawn(chart) for chart in charts(runs))
    if not figures:
        return paragraph("No step is done yet.")
    seams = ", ".join(f"{step:,}" for step in runs[0].seams) if len(runs) == 1 else ""
    note = paragraph(f"Resumed after step {seams} (dotted lines).") if seams else ""
    return f'<div class="charts">\n{figures}</div>{note}'


def _tiles(run: History) -> str:
    """Return the figures that the sentence above does not tell."""
    trained, total = (run.started.get(f"num_{name}", 0) for name in ("trainable", "parameters"))
    peak = max(run.curves["peak_bytes"].values, default=0.0)
    best = run.eval_loss.best()
    tiles = {
        "best eval loss": f"{best[1]:.4g} at step {best[0]:,}" if best else "",
        "trained": f"{count(trained)} ({100 * trained / total:.2f}\u202f%)" if total else "",
        "tokens": count(run.num_tokens) if run.num_tokens else "",
        "peak memory": size(peak) if peak else "",
        "device": run.started.get("device", ""),
    }
    shown = (f"<div><span>{a}</span><b>{text(b)}</b></div>" for a, b in tiles.items() if b)
    return f'<div class="tiles">{"".join(shown)}</div>'
