"""`peftkit report` and `peftkit runs`: what runs did, to look at and to compare."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from peftkit_cli.arguments import Json, note

SHOWN_SETTINGS = 6


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The file to write; by default report.html in the folder of the run.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[
        bool, typer.Option("--png", help="Write the curves as a PNG, which needs Pillow.")
    ] = False,
) -> None:
    """Show what a run did, or compare several: curves, samples, data, recipe, in one HTML file.
    Prints the file's path."""
    from peftkit.report.write import write_report

    name = "report.png" if png else "report.html"
    where = out or (runs[0] / name if len(runs) == 1 else Path(name))
    typer.echo(write_report(runs, where, png=png))


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with runs in it, at any depth.")
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a folder, the newest first: state, steps, losses, what differs."""
    from peftkit.report.runs import list_runs

    found = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([asdict(run) for run in found], indent=2))
        return
    from rich.console import Console

    from peftkit.events import Table
    from peftkit.report.figures import duration, size
    from peftkit_cli.render import show_table

    settings = list(dict.fromkeys(key for run in found for key in run.differs))
    shown, more = settings[:SHOWN_SETTINGS], settings[SHOWN_SETTINGS:]
    columns = ("run", "state", "steps", "loss", "eval", "best", "at", "adapter", "time")
    rows = [
        (
            run.run,
            run.state,
            f"{run.step:,}/{run.num_steps:,}",
            *(_figure(value) for value in (run.loss, run.eval_loss, run.best_eval_loss)),
            "-" if run.best_step is None else f"{run.best_step:,}",
            "-" if run.num_bytes is None else size(run.num_bytes),
            duration(run.seconds),
            *(run.differs.get(key, "-") for key in shown),
        )
        for run in found
    ]
    show_table(Console(highlight=False), Table("", (*columns, *shown), tuple(rows)))
    if more:
        note(f"They differ too in {', '.join(more)}: see --json, or peftkit report RUN RUN.")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
