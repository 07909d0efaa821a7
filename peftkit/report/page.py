"""The report of one run or of several, as one HTML file that needs nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence

from peftkit.report import sections
from peftkit.report.chart import charts
from peftkit.report.drawing import drawn
from peftkit.report.figures import count, duration, size
from peftkit.report.history import History
from peftkit.report.html import Html, element, joined, table
from peftkit.report.look import POLICY, SCRIPT, STYLE
from peftkit.report.verdict import verdict, warnings

REFRESH_SECONDS = 30
"""How often a browser reads the report of a run that goes on again."""


def page(runs: Sequence[History]) -> str:
    """Return the report as HTML."""
    one = len(runs) == 1
    body = _one(runs[0]) if one else _several(runs)
    title = runs[0].name if one else f"{len(runs)} runs"
    reload = REFRESH_SECONDS if one and runs[0].state() == "running" else None
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="refresh", content=reload) if reload else None,
        element("title", f"{title} - peftkit"),
        element("link", rel="icon", href="data:,"),
        element("style", Html(STYLE)),
    )
    whole = element("html", head, element("body", body, element("script", Html(SCRIPT))), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _one(run: History) -> Html:
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return joined(
        [
            element("h1", run.name, " ", element("span", run.state(), cls=f"state {_word(run)}")),
            element("p", verdict(run), cls="verdict"),
            [element("p", text, cls="warning") for text in warnings(run)],
            _tiles(run),
            element("h2", "Curves"),
            _curves([run]),
            sections.samples(run),
            sections.data(run),
            sections.model(run),
            sections.recipe(run),
            sections.machine(run),
            sections.notices(run),
            sections.commands(run),
            element("p", f"Written by peftkit, {written}.", cls="soft"),
        ]
    )


def _several(runs: Sequence[History]) -> Html:
    rows = [
        (
            element("a", run.name, href=f"#run-{number}"),
            run.state(),
            f"{run.step:,}",
            *_losses(run),
            duration(run.seconds),
        )
        for number, run in enumerate(runs)
    ]
    columns = ("run", "state", "steps", "loss", "eval loss, best", "eval loss, last", "time")
    parts: list[object] = [
        element("h1", f"{len(runs)} runs"),
        table(columns, rows, numbers=True),
        element("h2", "What differs"),
        sections.differences(runs),
        element("h2", "Curves"),
        _curves(runs),
    ]
    for number, run in enumerate(runs):
        parts += [
            element("h2", run.name, id=f"run-{number}"),
            element("p", verdict(run)),
            [element("p", text, cls="warning") for text in warnings(run)],
            sections.commands(run, title="h3"),
        ]
    return joined(parts)


def _losses(run: History) -> tuple[str, str, str]:
    loss = run.curves["loss"].smoothed().values
    evals = run.evals["loss"].values if "loss" in run.evals else ()
    return (
        f"{loss[-1]:.4g}" if loss else "-",
        f"{min(evals):.4g}" if evals else "-",
        f"{evals[-1]:.4g}" if evals else "-",
    )


def _curves(runs: Sequence[History]) -> Html:
    figures = [drawn(chart) for chart in charts(runs)]
    if not figures:
        return element("p", "No step is done yet.", cls="soft")
    seams = runs[0].seams if len(runs) == 1 else ()
    note = ", ".join(f"{step:,}" for step in seams)
    return joined(
        [
            element("div", figures, cls="charts"),
            element("p", f"Resumed after step {note} (dotted lines).", cls="soft")
            if note
            else None,
        ]
    )


def _tiles(run: History) -> Html:
    started, loss = run.started, run.curves["loss"].smoothed().values
    evals = run.evals.get("loss")
    peak = run.curves["peak_bytes"].values
    trainable, total = started.get("num_trainable"), started.get("num_parameters")
    tiles = [("steps", f"{run.step:,} of {run.num_steps:,}"), ("time", duration(run.seconds))]
    if loss:
        tiles.append(("loss, first to last", f"{loss[0]:.4g} → {loss[-1]:.4g}"))
    if evals:
        at = min(range(len(evals)), key=lambda n: evals.values[n])
        tiles.append(("best eval loss", f"{evals.values[at]:.4g} at step {evals.steps[at]:,}"))
    if isinstance(trainable, int) and isinstance(total, int) and total:
        tiles.append(("trained", f"{count(trainable)} ({100 * trainable / total:.2f}\u202f%)"))
    if run.num_tokens:
        tiles.append(("tokens", count(run.num_tokens)))
    if peak and max(peak) > 0:
        tiles.append(("peak memory", size(max(peak))))
    if started.get("device"):
        tiles.append(("device", str(started["device"])))
    return element("div", [element("div", element("span", a), element("b", b)) for a, b in tiles],
                   cls="tiles")  # fmt: skip


def _word(run: History) -> str:
    return run.state().replace(" ", "-")
