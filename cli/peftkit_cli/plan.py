"""`peftkit plan`: estimate the memory, time and disk space of a run from the model config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peftkit.events import Stage
from peftkit.figures import size
from peftkit_cli.about import check_recipe_exists
from peftkit_cli.arguments import Json, Overrides

if TYPE_CHECKING:
    from peftkit.planning.memory import Strategy
    from peftkit.planning.plan import Plan

COLUMNS = (
    *("base", "activations", "peak", "weights", "adapter", "step", "main"),
    *("fits", "longest"),
)
"""Sizes are in GB. peak: the sum of weights, adapter (with gradients and optimizer state), step
(activations) and what the process takes; main: streamed weights and offloaded activations in main
memory; longest: longest row that fits, in tokens."""


def plan(
    what: str,
    memory: str | None = None,
    link: Annotated[float, typer.Option(min=0.1)] = 16.0,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Estimate the memory, time and disk space of a run.

    If the run does not fit into memory, suggests a change.

    Args:
        what (RECIPE|MODEL): A recipe; or a model: hub id, folder, .gguf file or short name.
        memory (SIZE): GPU memory to plan for, such as 24GB. Default: the memory of this machine.
        link (GB/s): Host-to-GPU bandwidth for streamed weights.
    """
    if what.endswith((".yaml", ".yml")):
        check_recipe_exists(Path(what))
    from peftkit_cli.render import Renderer

    with Renderer(transient=True) as on_event:
        from peftkit.planning.plan import plan_run

        on_event(Stage("Counting tokens, and measuring the speed of this machine"))
        estimate = plan_run(what, memory=memory, overrides=overrides or (), link=link)
    if as_json:
        typer.echo(json.dumps(estimate.as_json(), indent=2))
        return
    _show(estimate)


def _show(plan: Plan) -> None:
    from rich.console import Console

    from peftkit.events import Table
    from peftkit.figures import count
    from peftkit_cli.render import show_table

    console = Console(highlight=False)
    where = "a GPU" if plan.on_gpu else "this machine's CPU"
    storage = plan.stored or f"quantize {plan.quantize}"
    Console(stderr=True, highlight=False).print(
        f"{plan.model}: {count(plan.num_parameters)} parameters "
        f"({plan.dtype}, {storage}), {count(plan.num_trained)} trained "
        f"({100 * plan.num_trained / plan.num_parameters:.2f} % of the base's).",
        markup=False,
    )
    title = (
        f"Memory in GB, batches of {plan.rows} x {plan.length:,} tokens on {where}: "
        f"{size(plan.usable_bytes, 2)} usable of {size(plan.memory_bytes, 2)}"
    )
    rows = tuple(_strategy_row(strategy, plan.rows) for strategy in plan.ways)
    columns: tuple[str, ...] = COLUMNS
    if not any(strategy.host_bytes for strategy in plan.ways):
        at = COLUMNS.index("main")
        columns, *rest = ((*row[:at], *row[at + 1 :]) for row in (COLUMNS, *rows))
        rows = tuple(rest)
    show_table(console, Table(title, columns, rows))
    process = sorted({size(way.peak_bytes - sum(_parts(way)), 2) for way in plan.ways})
    facts = {"of each peak, the process": " or ".join(process), **plan.facts()}
    show_table(console, Table("", ("what", "how much"), tuple(facts.items())))
    console.print(plan.verdict(), markup=False)


def _parts(strategy: Strategy) -> tuple[int, int, int]:
    """Return the bytes of weights, of the adapter and its optimizer, and of activations."""
    sizes = strategy.by_category
    adapter = sum(sizes[name] for name in ("adapters", "gradients", "optimizer"))
    return sizes["weights"], adapter, sizes["activations"]


def _strategy_row(strategy: Strategy, rows: int) -> tuple[str, ...]:
    most_rows = strategy.most_rows
    return (
        strategy.placement,
        strategy.activations,
        *(f"{n / 1e9:.2f}" for n in (strategy.peak_bytes, *_parts(strategy))),
        f"{strategy.host_bytes / 1e9:.2f}" if strategy.host_bytes else "",
        "yes" if strategy.fits else f"{most_rows} of {rows} rows" if most_rows else "no",
        f"{strategy.longest_row:,}",
    )
