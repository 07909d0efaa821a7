"""`peftkit report` and `peftkit runs`: look at runs and compare them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from peftkit_cli.arguments import Json, note

SHOWN_SETTINGS = 6


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write; by default RUN/report.html."),
    ] = None,
) -> None:
    """Write a run's report, or compare several runs, as one HTML file. Prints its path.

    It shows the curves, samples, data, recipe and versions.
    """
    from peftkit.report.page import REPORT, write_report

    typer.echo(write_report(runs, out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))))


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with runs in it, at any depth.")
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a folder, newest first: state, steps, losses, differing settings."""
    from peftkit.report.history import list_runs

    listed = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([asdict(run) for run in listed], indent=2))
        return
    from peftkit.figures import duration, short
    from peftkit_cli.render import print_table

    settings = list(dict.fromkeys(key for run in listed for key in run.differs))
    shown, more = settings[:SHOWN_SETTINGS], settings[SHOWN_SETTINGS:]
    columns = ("run", "state", "steps", "loss", "eval", "best", "at", "time")
    rows = [
        (
            run.run,
            run.state,
            f"{run.step:,}/{run.num_steps:,}",
            *map(short, (run.loss, run.eval_loss, run.best_eval_loss)),
            "-" if run.best_step is None else f"{run.best_step:,}",
            duration(run.seconds),
            *(run.differs.get(key, "-") for key in shown),
        )
        for run in listed
    ]
    print_table("", (*columns, *shown), rows)
    if more:
        note(f"They also differ in {', '.join(more)}: see --json, or peftkit report RUN RUN.")
