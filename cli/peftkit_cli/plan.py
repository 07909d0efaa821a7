"""`peftkit plan`: estimate the memory, time and disk space of a run from the model config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
"""Sizes are in GB. adapter: with gradients and optimizer state; main: streamed weights and
offloaded activations in main memory; longest: longest row that fits, in tokens."""

FEW_SECONDS = 10.0
"""Runs below it are estimated as a few seconds: the estimate counts arithmetic and memory only."""


def plan(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODEL",
            help="A recipe; or a model: hub id, folder, .gguf file or short name.",
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="GPU memory to plan for, such as 24GB. Default: the memory of this machine.",
        ),
    ] = None,
    link: Annotated[
        float,
        typer.Option(metavar="GB/s", min=0.1, help="Host-to-GPU bandwidth for streamed weights."),
    ] = 16.0,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Estimate the memory, time and disk space of a run.

    If the run does not fit into memory, suggests a change.
    """
    if what.endswith((".yaml", ".yml")):
        check_recipe_exists(Path(what))
    from peftkit.planning.plan import plan_run

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
        f"({100 * plan.num_trained / (plan.num_parameters + plan.num_trained):.2f} % of all).",
        markup=False,
    )
    title = (
        f"Memory of batches of {plan.rows} x {plan.length:,} tokens on {where}: "
        f"{size(plan.usable_bytes, 2)} usable of {size(plan.memory_bytes, 2)}"
    )
    rows = tuple(_strategy_row(strategy, plan.rows) for strategy in plan.ways)
    columns: tuple[str, ...] = COLUMNS
    if not any(strategy.host_bytes for strategy in plan.ways):
        at = COLUMNS.index("main")
        columns, rows = _without(at, COLUMNS), tuple(_without(at, row) for row in rows)
    show_table(console, Table(title, columns, rows))
    show_table(console, Table("", ("what", "how much"), tuple(_facts(plan).items())))
    console.print(_verdict(plan), markup=False)


def _without(index: int, cells: tuple[str, ...]) -> tuple[str, ...]:
    return (*cells[:index], *cells[index + 1 :])


def _strategy_row(strategy: Strategy, rows: int) -> tuple[str, ...]:
    sizes, most_rows = strategy.by_category, strategy.most_rows
    adapter = sum(sizes[name] for name in ("adapters", "gradients", "optimizer"))
    return (
        strategy.placement,
        strategy.activations,
        *(f"{each / 1e9:.2f}" for each in (strategy.peak_bytes, sizes["weights"], adapter)),
        f"{sizes['activations'] / 1e9:.2f}",
        f"{strategy.host_bytes / 1e9:.2f}" if strategy.host_bytes else "",
        "yes" if strategy.fits else f"{most_rows} of {rows} rows" if most_rows else "no",
        f"{strategy.longest_row:,}",
    )


def _facts(plan: Plan) -> Mapping[str, str]:
    from peftkit.figures import rough_duration

    chosen = plan.chosen
    facts = {
        "batch": f"{chosen.step_flops / 1e12:,.2f} TFLOP ({chosen.activations})",
        **_streamed(plan),
        "adapter file": size(plan.adapter_bytes, 2),
        "disk, checkpoints and all": size(plan.disk_bytes, 2),
    }
    work = "the run" if plan.run_tokens else "a batch"
    if plan.run_tokens:
        facts["data"] = f"about {plan.num_tokens:,} tokens in {plan.num_rows:,} rows"
        ratio = plan.num_trained / max(plan.num_tokens or 1, 1)
        facts["trained parameters per token"] = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
    if plan.seconds_here is not None:
        load = "with the current load" if is_busy() else "on an idle machine"
        facts[f"{work} here"] = f"about {rough_duration(plan.seconds_here)} once loaded, {load}"
    for name, seconds in plan.seconds_on.items():
        estimate = rough_duration(seconds) if seconds >= 0.1 else "under 0.1 s"
        if plan.run_tokens and seconds < FEW_SECONDS:
            facts[f"{work} on {name}"] = "a few seconds once loaded; launches of kernels dominate"
        else:
            facts[f"{work} on {name}"] = f"{estimate} once loaded, at 40 % of bf16 peak"
    return facts


def is_busy() -> bool:
    """Return whether the load average reaches the number of cores; False on Windows."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] >= (os.cpu_count() or 1)


def _streamed(plan: Plan) -> Mapping[str, str]:
    chosen = plan.chosen
    if chosen.placement != "stream":
        return {}
    seconds = chosen.moved_bytes / (plan.link * 1e9)
    hidden = f"; {chosen.compute_bound_tokens:,} tokens hide it" if plan.on_gpu else ""
    return {
        "in main memory": f"{size(chosen.host_bytes, 2)} of blocks and their inputs",
        "moved in a batch": f"{size(chosen.moved_bytes, 2)}, {seconds:.2g} s at {plan.link:g} GB/s"
        + hidden,
    }


def _verdict(plan: Plan) -> str:
    if plan.fits:
        fewer = "" if plan.chosen.fits else " with smaller micro-batches"
        return f"It fits into memory{fewer}.\nExecution plan: {plan.execution.describe()}."
    several = next((share.cards for share in plan.cards if share.fits), 0)
    other = f"\nWith --set train.shard=base, it fits on {several} such GPUs." if several else ""
    if plan.change:
        return f"It does not fit into memory. The cheapest fix:\n  {plan.change}{other}"
    return f"It does not fit into memory with any setting.{other}"
