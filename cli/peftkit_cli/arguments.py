"""Arguments that several commands share, and what can be said of them without torch."""

from __future__ import annotations

from typing import Annotated

import typer

Adapter = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER",
        help="A folder of peftkit's or PEFT's; or USER/NAME[@REVISION] on the hub.",
        show_default=False,
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The base to use instead of the one the adapter names: "
        "hub id, folder, .gguf file or short name.",
        show_default=False,
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Use the adapter though it was trained on another base."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one field of the recipe, as train.learning_rate=1e-4. Repeatable.",
        show_default=False,
    ),
]


def note(text: str) -> None:
    """Say something on stderr: stdout is for the command's data."""
    typer.echo(text, err=True)
