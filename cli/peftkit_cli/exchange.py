"""`peftkit export`, `import`, `push`, `pull`: exchange adapters with other programs and the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from peftkit.errors import ConfigError
from peftkit_cli.arguments import Adapter, Base, OutFolder, Replace, note

TensorDtype = Literal["fp32", "fp16", "bf16", "q8_0"]


def export(
    adapter: Adapter,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="peft, gguf, mlx, or a format that another package adds."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="PATH", help="New folder; for gguf, a new file.")],
    profile: Annotated[
        Literal["serving"] | None,
        typer.Option(metavar="serving", help="With --to peft: write an adapter that vLLM accepts."),
    ] = None,
    base: Base = None,
    dtype: Annotated[
        TensorDtype,
        typer.Option(
            metavar="TYPE", help="Dtype of the tensors: fp32, fp16, bf16; for gguf also q8_0."
        ),
    ] = "fp32",
    force: Replace = False,
) -> None:
    """Write an adapter for PEFT, vLLM, llama.cpp or MLX. Prints its path.

    Only gguf needs the base, and reads its config only.
    """
    if profile and to != "peft":
        raise ConfigError(
            f"--profile {profile} cannot be used with --to {to}.", fix="Use it with --to peft."
        )
    from peftkit.formats.exchange import export_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        done = export_adapter(
            adapter,
            out,
            to=to,
            serving=profile == "serving",
            base=base,
            dtype=dtype,
            force=force,
            on_event=on_event,
        )
    typer.echo(done.path)
    for program, command in done.commands.items():
        note(f"{program}: {command}")


def import_(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="Folder of mlx-lm or PEFT, or a GGUF LoRA file."),
    ],
    out: OutFolder,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Base of the adapter, if the adapter does not name it."),
    ] = None,
    force: Replace = False,
) -> None:
    """Convert an adapter of another program. Prints the new folder."""
    from peftkit.formats.exchange import import_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        done = import_adapter(path, out, base=base, force=force, on_event=on_event)
    typer.echo(done.folder)
    note(f"Next: peftkit chat {done.folder}")


def push(
    adapter: Adapter,
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository to upload to.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository.")
    ] = False,
) -> None:
    """Upload an adapter to the hub, in one commit. Prints the URL of the commit."""
    from peftkit.formats.find_adapter import adapter_folder
    from peftkit.formats.hub import push_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        done = push_adapter(adapter_folder(adapter), name, private=private, on_event=on_event)
    typer.echo(done.url)
    note(
        f"Commit {done.commit} holds {', '.join(done.files)}.\nNext: peftkit pull {name} --out DIR"
    )


def pull(
    name: Annotated[str, typer.Argument(metavar="ID[@REVISION]", help="USER/NAME on the hub.")],
    out: OutFolder,
    force: Replace = False,
) -> None:
    """Download an adapter from the hub and check it. Prints the folder."""
    from peftkit.formats.hub import pull_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        done = pull_adapter(name, out, force=force, on_event=on_event)
    typer.echo(done.folder)
    note(f"Commit {done.commit} of {done.repo}.\nNext: peftkit inspect {done.folder}")
