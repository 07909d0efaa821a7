"""`peftkit sweep`, `report` and `runs`: train several runs, look at them, compare them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from peftkit.errors import ConfigError
from peftkit.formats.folders import SWEEP
from peftkit_cli.about import check_recipe_exists
from peftkit_cli.arguments import Json, Overrides, Quiet, note

SHOWN_SETTINGS = 6


def sweep(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.")],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="Train with each of these values: method.rank=8,16,64. Repeatable: a grid.",
        ),
    ] = None,
    pick: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Train the runs defined in a YAML file: {NAME: {method.rank: 8}}.",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the sweep; each run has a folder in it. Default: train.output_dir of "
            "the recipe, else runs/sweep.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in DIR.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several adapters over one base, which is loaded once. Prints the folder of the best."""
    if bool(over) == bool(pick):
        raise ConfigError(
            "a sweep takes a recipe with --over or --pick",
            fix="peftkit sweep RECIPE.yaml --over method.rank=8,16 --out runs/sweep",
        )
    check_recipe_exists(recipe)
    from peftkit import sweeps
    from peftkit.recipe import load
    from peftkit.report.page import REPORT
    from peftkit.sweeps import BEST
    from peftkit_cli.render import Renderer

    settings = overrides or ()
    if out is None:
        train = load(recipe, settings).train
        out = train.output_dir if "output_dir" in train.model_fields_set else Path("runs/sweep")
    if pick:
        members = sweeps.pick(recipe, pick, settings, out=out)
    else:
        members = sweeps.grid(recipe, over or (), settings, out=out)
    with Renderer(brief=True, quiet=quiet) as on_event:
        best, *_ = sweeps.sweep(members, out, resume=resume, on_event=on_event)
    if as_json:
        typer.echo((out / SWEEP).read_text(encoding="utf-8"))
    else:
        typer.echo(out / BEST)
        task = next(member.recipe.task for member in members if member.name == best.name)
        command = task.command.format(folder=out / BEST)
        note(f"Next: {command}; all members: {out / REPORT}, {out / SWEEP}")


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a sweep's.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write; by default RUN/report.html."),
    ] = None,
) -> None:
    """Write a run's report, or compare several runs, as one HTML file. Prints its path.

    It shows the curves, samples, data, recipe and versions.
    """
    from peftkit.report.history import METRICS
    from peftkit.report.page import REPORT, write_report

    if len(runs) == 1 and not (runs[0] / METRICS).exists() and (runs[0] / SWEEP).is_file():
        out = out or runs[0] / REPORT
        runs = sorted(path.parent for path in runs[0].glob(f"*/{METRICS}")) or runs
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
    from peftkit.figures import RECENT_STEPS, duration, short
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
    means = f"loss: mean of the last {RECENT_STEPS} steps"
    note(f"{means}; eval: of the last evaluation; best: the lowest.")
    if more:
        note(f"They also differ in {', '.join(more)}: see --json, or peftkit report RUN RUN.")
