"""Arguments that several commands share, and what can be said of them without torch."""

from __future__ import annotations

from typing import Annotated

import typer

Adapter = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER",
        help="A folder saved by peftkit or PEFT, or USER/NAME[@REVISION] on the hub.",
        show_default=False,
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Base model, if not the one recorded in the adapter: "
        "hub id, folder, .gguf file or short name.",
        show_default=False,
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Use the adapter even if it was trained on another base."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a field of the recipe: train.learning_rate=1e-4. Repeatable.",
        show_default=False,
    ),
]


def note(text: str) -> None:
    """Say something on stderr: stdout is for the command's data."""
    typer.echo(text, err=True)
