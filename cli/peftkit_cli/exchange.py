"""`peftkit export`, `import`, `push`, `pull`: adapters between programs and machines."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from peftkit.errors import ConfigError, PeftkitError
from peftkit_cli.arguments import Adapter, note

Replace = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
OutFolder = Annotated[
    Path, typer.Option(metavar="DIR", help="A new folder for the adapter.", show_default=False)
]


class Format(str, Enum):
    """Names that --to takes."""

    peft = "peft"
    gguf = "gguf"
    mlx = "mlx"


class Profile(str, Enum):
    """Names that --profile takes."""

    serving = "serving"


class TensorDtype(str, Enum):
    """Names that --dtype takes."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    q8_0 = "q8_0"


def export(
    adapter: Adapter,
    to: Annotated[Format, typer.Option(help="Format to write.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="A new folder; for gguf, a new file.", show_default=False
        ),
    ],
    profile: Annotated[
        Profile | None,
        typer.Option(help="With --to peft: write what vLLM accepts.", show_default=False),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Base model, if not the one recorded; only its config is read, for gguf.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        TensorDtype, typer.Option(help="dtype of the tensors; q8_0 only for gguf.")
    ] = TensorDtype.fp32,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Reduce higher ranks to this one by SVD, and print the error.",
            show_default=False,
        ),
    ] = None,
    max_rank: Annotated[
        int, typer.Option(min=1, max=512, help="With --profile: the server's --max-lora-rank.")
    ] = 512,
    force: Replace = False,
) -> None:
    """Write an adapter for PEFT, vLLM, llama.cpp or MLX. Prints its path."""
    if profile and to is not Format.peft:
        raise ConfigError(
            f"there is no --profile {profile.value} of {to.value}", fix="Use it with --to peft."
        )
    from peftkit.transform.exchange import export_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        done = export_adapter(
            adapter,
            out,
            to=to.value,
            serving=profile is Profile.serving,
            base=base,
            dtype=dtype.value,
            rank=rank,
            max_rank=max_rank,
            force=force,
            on_event=on_event,
        )
    typer.echo(done.path)
    if done.errors:
        note(f"Rank {rank}: {_lost(done.errors)}")
    for program, command in done.commands.items():
        note(f"{program}: {command}")


def _lost(errors: Mapping[str, float]) -> str:
    """Say what a lower rank cost, of the relative error of each layer's update."""
    worst, largest = max(errors.items(), key=lambda error: error[1])
    mean = sum(errors.values()) / len(errors)
    return (
        f"{len(errors)} layers reduced; relative error of their updates "
        f"{mean:.2%} in the mean, {largest:.2%} at most ({worst})."
    )


def import_(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A folder of mlx-lm or PEFT, or a GGUF LoRA file.",
            show_default=False,
        ),
    ],
    out: OutFolder,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Base model it was trained on: hub id, folder or short name; by default the one "
            "that the adapter names.",
            show_default=False,
        ),
    ] = None,
    force: Replace = False,
) -> None:
    """Convert another program's adapter to an adapter folder. Prints the folder."""
    from peftkit.transform.exchange import import_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        done = import_adapter(path, out, base=base, force=force, on_event=on_event)
    typer.echo(done.folder)
    note(f"Next: peftkit chat {done.folder}")


def push(
    adapter: Adapter,
    name: Annotated[
        str,
        typer.Argument(metavar="USER/NAME", help="Repository to upload to.", show_default=False),
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Create it as a private repository.")
    ] = False,
) -> None:
    """Upload an adapter to the hub, in one commit. Prints the commit's page."""
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
    name: Annotated[
        str,
        typer.Argument(metavar="ID[@REVISION]", help="USER/NAME on the hub.", show_default=False),
    ],
    out: OutFolder,
    force: Replace = False,
) -> None:
    """Download an adapter from the hub and check it. Prints the folder."""
    from peftkit.formats.hub import pull_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        done = pull_adapter(name, out, force=force, on_event=on_event)
    typer.echo(done.folder)
    note(f"Commit {done.commit} of {done.repo}.\nNext: {_use_of(done.folder)}")


def _use_of(folder: Path) -> str:
    """Return the command for what an adapter was trained to do."""
    from peftkit.formats.open_adapter import task_of
    from peftkit.formats.peft.folder import read_adapter

    try:
        return task_of(read_adapter(folder)).command.format(folder=folder)
    except PeftkitError:  # it is downloaded all the same
        return f"peftkit inspect {folder}"
