"""`peftkit plan`: what a run will cost, before anything but the model's config is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from peftkit.errors import neighbours
from peftkit_cli.arguments import Json, Overrides, note

if TYPE_CHECKING:
    from peftkit.planning.plan import Plan

CATEGORIES = ("weights", "adapters", "gradients", "optimizer", "activations")


def plan(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODEL",
            help="A recipe; or a model: hub id, folder, .gguf file or short name.",
            show_default=False,
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of the GPU asked about: 8GB, 12GB, 24GB ... Default: this machine's.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Tell what a run will cost: memory, time, disk; and what to change if it does not fit."""
    from pathlib import Path

    from peftkit.errors import ConfigError

    if what.endswith((".yaml", ".yml")) and not Path(what).is_file():
        raise ConfigError(
            f"Cannot read {what}: no such file.", found=neighbours(Path(what), "*.y*ml")
        )
    from peftkit.planning.plan import plan_run

    found = plan_run(what, memory=memory, overrides=overrides or ())
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    _show(found)


def _show(plan: Plan) -> None:
    from rich.console import Console

    from peftkit.events import Table
    from peftkit.report.figures import count
    from peftkit_cli.render import show_table

    console = Console(highlight=False)
    where = "a GPU" if plan.on_gpu else "this machine's CPU"
    note(
        f"{plan.model}: {count(plan.num_parameters)} parameters "
        f"({plan.dtype}, quantize {plan.quantize}), {count(plan.num_trained)} trained "
        f"({100 * plan.num_trained / plan.num_parameters:.2f} %)."
    )
    columns = ("activations", "peak", *CATEGORIES, "fits", "longest row", "rows at once")
    rows = tuple(
        (
            way.activations,
            _gb(way.peak_bytes),
            *(_gb(way.by_category[name]) for name in CATEGORIES),
            "yes" if way.fits else "no",
            f"{way.longest_row:,}",
            f"{way.most_rows:,}",
        )
        for way in plan.ways
    )
    title = (
        f"Memory of {plan.rows} x {plan.length:,} tokens at once on {where}: "
        f"{_gb(plan.usable_bytes)} usable of {_gb(plan.memory_bytes)}"
    )
    show_table(console, Table(title, columns, rows))
    show_table(console, Table("", ("what", "how much"), tuple(_facts(plan).items())))
    typer.echo(_verdict(plan))


def _facts(plan: Plan) -> Mapping[str, str]:
    from peftkit.report.figures import duration

    chosen = plan.chosen
    found = {
        "batch": f"{chosen.step_flops / 1e12:,.2f} TFLOP ({chosen.activations})",
        "adapter file": _gb(plan.adapter_bytes),
        "disk, checkpoints and all": _gb(plan.disk_bytes),
    }
    work = "the run" if plan.run_tokens else "a batch"
    if plan.run_tokens:
        found["data"] = (
            f"about {plan.num_tokens:,} tokens in {plan.num_rows:,} rows "
            f"({(plan.num_tokens or 0) / max(plan.num_trained, 1):.2g} for each trained parameter)"
        )
    if plan.seconds_here is not None:
        found[f"{work} here"] = f"about {duration(plan.seconds_here)}, by a measured product"
    for name, seconds in plan.seconds_on.items():
        shown = duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"
        found[f"{work} on {name}"] = f"{shown} (at 40 % of its bf16 peak)"
    return found


def _verdict(plan: Plan) -> str:
    if plan.fits:
        how = plan.chosen.activations
        less = "" if plan.chosen.fits else ", with fewer rows at a time"
        return f"It fits: activations: {how}{less}."
    if plan.change:
        return f"It does not fit. The cheapest change that does:\n  {plan.change}"
    return "It does not fit, and no setting of this model does."


def _gb(num_bytes: float) -> str:
    if num_bytes >= 1e8:
        return f"{num_bytes / 1e9:,.2f} GB"
    return f"{num_bytes / 1e6:,.1f} MB"
