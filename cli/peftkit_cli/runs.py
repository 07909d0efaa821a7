"""`peftkit sweep`, `report` and `runs`: train, inspect and compare several runs."""

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

MAX_SETTINGS = 6


def sweep(
    recipe: Path,
    over: list[str] | None = None,
    pick: Path | None = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(show_default=False)] = None,
    resume: bool = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several adapters on one base, and compare them. Prints the folder of the best.

    Args:
        recipe (RECIPE.yaml): The recipe.
        over (KEY=VALUE,VALUE): Values to train with: method.rank=8,16,64. Repeatable, for a grid.
        pick (FILE): Train the runs defined in a YAML file: {NAME: {method.rank: 8}}.
        out (DIR): Folder for the sweep and its runs. Default: train.output_dir of the recipe, else
            runs/sweep.
        resume: Continue the sweep in DIR.
    """
    if bool(over) == bool(pick):
        raise ConfigError(
            "a sweep needs either --over or --pick.",
            fix="For example: peftkit sweep RECIPE.yaml --over method.rank=8,16 --out runs/sweep",
        )
    check_recipe_exists(recipe)
    from peftkit_cli.render import Renderer

    with Renderer(brief=True, quiet=quiet) as on_event:
        from peftkit.recipe import load
        from peftkit.report.page import REPORT
        from peftkit_cli import sweeps
        from peftkit_cli.sweeps import BEST

        settings = overrides or ()
        if out is None:
            train = load(recipe, settings).train
            out = train.output_dir if "output_dir" in train.model_fields_set else Path("runs/sweep")
        if pick:
            members = sweeps.pick(recipe, pick, settings, out=out)
        else:
            members = sweeps.grid(recipe, over or (), settings, out=out)
        best, *_ = sweeps.sweep(members, out, resume=resume, on_event=on_event)
    if as_json:
        typer.echo((out / SWEEP).read_text(encoding="utf-8"))
    else:
        typer.echo(out / BEST)
        task = next(member.recipe.task for member in members if member.name == best.name)
        command = task.command.format(folder=out / BEST)
        note(f"Next: {command}; all members: {out / REPORT}, {out / SWEEP}")


def report(runs: list[Path], out: Path | None = None) -> None:
    """Write a report of one or several runs, as an HTML file.

    It shows curves, samples, data, recipe and versions. Prints the path of the file.

    Args:
        runs (RUN...): Folders of runs, or of a sweep.
        out (FILE): File to write. Default: RUN/report.html.
    """
    from peftkit.report.history import METRICS
    from peftkit.report.page import REPORT, write_report

    if len(runs) == 1 and not (runs[0] / METRICS).exists() and (runs[0] / SWEEP).is_file():
        out = out or runs[0] / REPORT
        runs = sorted(path.parent for path in runs[0].glob(f"*/{METRICS}")) or runs
    typer.echo(write_report(runs, out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))))


def runs(folder: Annotated[Path, typer.Argument()] = Path("runs"), as_json: Json = False) -> None:
    """List the runs in a folder, newest first.

    Shows state, steps, losses and the settings that differ.

    Args:
        folder (DIR): Folder that contains runs, at any depth.
    """
    from peftkit.report.history import list_runs

    listed = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([asdict(run) for run in listed], indent=2))
        return
    from peftkit.figures import RECENT_STEPS, duration, short
    from peftkit_cli.render import print_table

    settings = list(dict.fromkeys(key for run in listed for key in run.differs))
    columns = settings[:MAX_SETTINGS]
    rows = [
        (
            run.run,
            run.state,
            f"{run.step:,}/{run.num_steps:,}",
            *map(short, (run.loss, run.eval_loss, run.best_eval_loss)),
            "-" if run.best_step is None else f"{run.best_step:,}",
            duration(run.seconds),
            *(run.differs.get(key, "-") for key in columns),
        )
        for run in listed
    ]
    names = ("run", "state", "steps", "loss", "eval", "best", "at", "time")
    print_table("", (*names, *columns), rows)
    note(
        f"loss: mean of the last {RECENT_STEPS} steps; eval: loss of the last evaluation; "
        "best: lowest eval loss."
    )
    if rest := ", ".join(settings[MAX_SETTINGS:]):
        note(f"The runs also differ in {rest}: see --json, or peftkit report RUN RUN.")
