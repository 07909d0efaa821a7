"""Arguments that several commands share, and what can be said of them without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peftkit.errors import AdapterError, did_you_mean

Adapter = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER", help="A folder: one of peftkit's runs, or PEFT's.", show_default=False
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


def adapter_folder(text: str) -> Path:
    """Return `text` as an adapter's folder, or say at once what it is instead.

    Only names are looked at, so a misspelt path is answered before torch is imported.
    """
    folder = Path(text)
    if not folder.exists():
        raise AdapterError(
            f"there is no adapter folder '{text}'.",
            found=_neighbours(folder),
            fix="Give the folder that holds adapter_config.json.",
        )
    if not folder.is_dir():
        raise AdapterError(
            f"'{text}' is a file, and an adapter is a folder.",
            fix=f"Give the folder that holds adapter_config.json, here perhaps '{folder.parent}'.",
        )
    if not (folder / "adapter_config.json").is_file():
        names = sorted(path.name for path in folder.iterdir())
        unfinished = "checkpoints" in names
        raise AdapterError(
            f"'{text}' holds no adapter_config.json.",
            found=f"It holds: {', '.join(names[:8]) or 'nothing'}.",
            fix="The run there has not finished: go on with peftkit train RECIPE.yaml --resume"
            if unfinished
            else "Give the folder that holds adapter_config.json.",
        )
    return folder


def _neighbours(path: Path) -> str:
    """Say what lies where `path` should be, and which name is near to it."""
    if not path.parent.is_dir():
        return f"'{path.parent}' is not there either."
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir())
    hint = did_you_mean(path.name, names)
    return f"'{path.parent}' holds: {', '.join(names[:8]) or 'no folder'}. {hint}".rstrip()
