"""`peftkit report`: what runs did, to look at and to compare."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from peftkit_cli.arguments import note


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
