"""`peftkit sweep`: several runs over one base, trained together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from peftkit.errors import ConfigError
from peftkit_cli.about import unknown_recipe_file
from peftkit_cli.arguments import Json, Overrides, Quiet, note


def sweep(
    recipes: Annotated[
        list[Path],
        typer.Argument(metavar="RECIPE.yaml...", help="A recipe; several with --each."),
    ],
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
    each: Annotated[
        bool, typer.Option("--each", help="Train each of the recipes, over one base.")
    ] = False,
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
    halve: Annotated[
        bool,
        typer.Option("--halve", help="Successive halving: stop the worse half after each third."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train many adapters over one base in one pass. Prints the folder of the best."""
    ways = [over, pick, each]
    if sum(bool(way) for way in ways) != 1 or (len(recipes) > 1 and not each):
        raise ConfigError(
            "a sweep takes a recipe with --over or --pick, or several recipes with --each",
            fix="peftkit sweep RECIPE.yaml --over method.rank=8,16 --out runs/sweep",
        )
    for path in recipes:
        if not path.exists():
            raise unknown_recipe_file(path)
    from peftkit.report.live import REPORT
    from peftkit.sweeps import members as made
    from peftkit.sweeps.outcomes import BEST, SWEEP
    from peftkit.sweeps.sweep import sweep as train_together
    from peftkit_cli.render import Renderer

    out = out or made.folder_of(recipes, overrides or ())
    if each:
        members = made.each(recipes, overrides or (), out=out)
    elif pick:
        members = made.pick(recipes[0], pick, overrides or (), out=out)
    else:
        members = made.grid(recipes[0], over or (), overrides or (), out=out)
    with Renderer(brief=True, quiet=quiet) as on_event:
        train_together(members, out, resume=resume, halve=halve, on_event=on_event)
    if as_json:
        typer.echo(json.dumps(json.loads((out / SWEEP).read_text(encoding="utf-8"))))
    else:
        typer.echo(out / BEST)
        note(f"Next: peftkit chat {out / BEST}; all members: {out / REPORT}, {out / SWEEP}")
