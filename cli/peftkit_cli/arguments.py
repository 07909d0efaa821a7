"""Arguments that several commands share, and what can be said of them without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peftkit.errors import AdapterError, did_you_mean, first_few
from peftkit.formats.hub_id import is_hub_id

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


def adapter_folder(text: str) -> Path:
    """Return `text` as an adapter's folder, or say at once what it is instead.

    Only names are looked at, so that a misspelt path is answered before torch is imported. What is
    on the hub is fetched.

    Raises:
        AdapterError: No folder there, or no adapter in it; the hub has it not, or does not answer.
    """
    folder = Path(text).expanduser()
    if folder.name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = folder.parent
    right = "Give the folder that holds adapter_config.json."
    if is_hub_id(text):
        from peftkit.formats.hub import resolve_adapter

        return resolve_adapter(text)
    if not folder.exists():
        raise AdapterError(
            f"there is no adapter folder '{text}'.", found=neighbours(folder), fix=right
        )
    if not folder.is_dir():
        raise AdapterError(f"'{text}' is a file, and an adapter is a folder.", fix=right)
    if not (folder / "adapter_config.json").is_file():
        names = sorted(path.name for path in folder.iterdir())
        inside = sorted(str(path.parent) for path in folder.glob("*/adapter_config.json"))
        if inside:
            right = f"Give one of the adapters in it: {first_few(inside, 8, ', ')}"
        elif "checkpoints" in names:
            right = "The run has not finished: go on with peftkit train RECIPE.yaml --resume"
        raise AdapterError(
            f"'{text}' holds no adapter_config.json.",
            found=f"It holds: {first_few(names, 8, ', ') or 'nothing'}.",
            fix=right,
        )
    return folder


def neighbours(path: Path, pattern: str = "*/") -> str:
    """Say what lies where `path` should be, and which name is near to it.

    Args:
        path: What is not there.
        pattern: Of the names worth mentioning; one that ends in a slash means folders.
    """
    folder = path.parent
    if not folder.is_dir():
        return f"The folder '{folder}' is not there either."
    # Before Python 3.11 a pattern that ends in a slash matches files too.
    names = sorted(
        entry.name
        for entry in folder.glob(pattern)
        if not entry.name.startswith(".") and (entry.is_dir() or not pattern.endswith("/"))
    )
    where = f"'{folder}'" if folder != Path(".") else "This folder"
    listed = first_few(names, 8, ", ")
    return f"{where} holds: {listed}. {did_you_mean(path.name, names)}".rstrip() if names else ""
