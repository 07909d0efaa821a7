"""`peftkit combine`, `peftkit extract`: adapters made of adapters, and of full fine-tunes."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from peftkit.errors import AdapterError
from peftkit.formats.find_adapter import adapter_folder
from peftkit_cli.arguments import note

Out = Annotated[
    Path, typer.Option(metavar="DIR", help="A new folder for the adapter.", show_default=False)
]
Replace = Annotated[bool, typer.Option("--force", help="Replace the adapter in that folder.")]


class Way(str, Enum):
    """Names that --method takes."""

    linear = "linear"
    cat = "cat"
    svd = "svd"
    ties = "ties"
    dare_linear = "dare_linear"
    dare_ties = "dare_ties"
    magnitude_prune = "magnitude_prune"


def combine(
    adapters: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER[=WEIGHT]...",
            help="Adapter folders with their weights: A=0.7 B=0.3. Without weights: equal shares.",
            show_default=False,
        ),
    ],
    out: Out,
    method: Annotated[
        Way,
        typer.Option(
            help="linear and cat: the exact sum, at the lowest rank, or with ranks added up. "
            "svd: the best approximation of a given rank. The others prune each update before "
            "adding them up."
        ),
    ] = Way.linear,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="R",
            help="Rank for svd and the pruning methods; by default the largest of the adapters.",
            show_default=False,
        ),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(
            metavar="D",
            help="Share of entries that the pruning methods keep; by default 0.5.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the entries that the DARE methods drop.")] = 0,
    force: Replace = False,
) -> None:
    """Combine adapters of one base into one. Prints the new adapter's folder."""
    weighted = _weighted(adapters)
    from peftkit.transform.combine import combine as combine_adapters
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        combine_adapters(
            weighted,
            method.value,
            out,
            rank=rank,
            density=density,
            seed=seed,
            force=force,
            on_event=on_event,
        )
    typer.echo(out)
    note(f"Next: peftkit chat '{out}'")


def _weighted(adapters: list[str]) -> list[tuple[Path, float]]:
    """Split each ADAPTER=WEIGHT at its last equals sign; without any weight all count alike."""
    bare = [text for text in adapters if "=" not in text or Path(text).exists()]
    if len(bare) == len(adapters):
        return [(adapter_folder(text), 1 / len(adapters)) for text in adapters]
    if bare:
        raise AdapterError(
            f"'{bare[0]}' has no weight, and others have.",
            fix=f"Write its weight after it: {bare[0]}=1. Or give none: all then count alike.",
        )
    found = []
    for text in adapters:
        name, _, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            raise AdapterError(
                f"the weight '{number}' of {name} is not a number.", fix=f"Write it as: {name}=0.5"
            ) from None
        found.append((adapter_folder(name), weight))
    return found


def extract(
    base: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The model before fine-tuning: folder or hub id.",
            show_default=False,
        ),
    ],
    tuned: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="The fine-tuned model: folder or hub id.", show_default=False
        ),
    ],
    rank: Annotated[
        int, typer.Option(min=1, metavar="R", help="Rank of the adapter.", show_default=False)
    ],
    out: Out,
    targets: Annotated[
        str,
        typer.Option(
            metavar="ROLES", help="Roles, groups or module names, separated by commas: q,v or ffn."
        ),
    ] = "all-linear",
    seed: Annotated[int, typer.Option(help="Seed of the decompositions of large matrices.")] = 0,
    force: Replace = False,
) -> None:
    """Extract the best adapter of a given rank from a full fine-tune. Prints its folder."""
    from peftkit.transform.extract import extract as extract_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        extract_adapter(
            base,
            tuned,
            rank,
            out,
            targets=[target.strip() for target in targets.split(",")],
            seed=seed,
            force=force,
            on_event=on_event,
        )
    typer.echo(out)
    note(f"Next: peftkit eval '{out}' --data FILE.jsonl, or peftkit chat '{out}'")
