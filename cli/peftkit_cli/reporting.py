"""`peftkit report` and `peftkit runs`: what runs did, to look at and to compare."""

from __future__ import annotations

import json
from contextlib import suppress
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
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Show it at a local address instead, while runs go on."),
    ] = False,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="With --serve; 0 picks a free port.")
    ] = 0,
) -> None:
    """Write a run's report, or compare several runs, as one HTML file. Prints its path.

    It shows the curves, samples, data, recipe and versions.
    """
    if serve:
        _serve(runs, port)
        return
    from peftkit.report.live import REPORT
    from peftkit.report.page import write_report

    typer.echo(write_report(runs, out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))))


def _serve(runs: list[Path], port: int) -> None:
    """Print the address, and answer until Ctrl-C."""
    from peftkit.report.server import ReportServer

    with ReportServer(runs, port) as server:
        typer.echo(server.address)
        to = f"{server.server_port}:127.0.0.1:{server.server_port}"
        note(f"Ctrl-C ends it. From another machine: ssh -L {to} THIS_MACHINE")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with runs in it, at any depth.")
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a folder, newest first: state, steps, losses, differing settings."""
    from peftkit.report.runs import list_runs

    found = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([asdict(run) for run in found], indent=2))
        return
    from peftkit.report.figures import duration
    from peftkit_cli.render import print_table

    settings = list(dict.fromkeys(key for run in found for key in run.differs))
    shown, more = settings[:SHOWN_SETTINGS], settings[SHOWN_SETTINGS:]
    columns = ("run", "state", "steps", "loss", "eval", "best", "at", "time")
    rows = [
        (
            run.run,
            run.state,
            f"{run.step:,}/{run.num_steps:,}",
            *(_figure(value) for value in (run.loss, run.eval_loss, run.best_eval_loss)),
            "-" if run.best_step is None else f"{run.best_step:,}",
            duration(run.seconds),
            *(run.differs.get(key, "-") for key in shown),
        )
        for run in found
    ]
    print_table("", (*columns, *shown), rows)
    if more:
        note(f"They also differ in {', '.join(more)}: see --json, or peftkit report RUN RUN.")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
