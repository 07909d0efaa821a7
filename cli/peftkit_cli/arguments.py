"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Adapter = Annotated[
    str,
    typer.Argument(metavar="ADAPTER", help="Adapter folder, or USER/NAME[@REVISION] on the hub."),
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Base model to use instead of the recorded one: hub id, folder, .gguf file or "
        "short name.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Use the adapter even if it was trained on another base.")
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help='System prompt, instead of the one used in training; "" for none.',
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show notices and errors only.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe field: train.learning_rate=1e-4. Repeatable.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run in the output folder.")
]
OutFolder = Annotated[Path, typer.Option(metavar="DIR", help="New folder for the adapter.")]
Replace = Annotated[bool, typer.Option("--force", help="Replace an adapter in the output folder.")]


def note(text: str) -> None:
    """Print a line to stderr; stdout is for data."""
    typer.echo(text, err=True)
