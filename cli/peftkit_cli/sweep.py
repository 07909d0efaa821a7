"""`peftkit sweep`: several runs over one base, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peftkit.errors import ConfigError
from peftkit_cli.about import unknown_recipe_file
from peftkit_cli.arguments import Json, Overrides, Quiet, note


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
    if not recipe.exists():
        raise unknown_recipe_file(recipe)
    from peftkit import sweeps
    from peftkit.report.page import REPORT
    from peftkit.sweeps import BEST, SWEEP
    from peftkit_cli.render import Renderer

    out, settings = out or sweeps.default_folder(recipe, overrides or ()), overrides or ()
    if pick:
        members = sweeps.pick(recipe, pick, settings, out=out)
    else:
        members = sweeps.grid(recipe, over or (), settings, out=out)
    with Renderer(brief=True, quiet=quiet) as on_event:
        sweeps.sweep(members, out, resume=resume, on_event=on_event)
    if as_json:
        typer.echo((out / SWEEP).read_text(encoding="utf-8"))
    else:
        typer.echo(out / BEST)
        note(f"Next: peftkit chat {out / BEST}; all members: {out / REPORT}, {out / SWEEP}")
