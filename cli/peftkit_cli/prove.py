"""`peftkit prove`: is the adapter applied, on a server, in a folder, in a file?"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peftkit.errors import AdapterError, ConfigError, PeftkitError, is_url, neighbours
from peftkit.formats.folders import PROOF, is_hub_id
from peftkit_cli.arguments import Base, Json, note, wrapped

if TYPE_CHECKING:
    from peftkit.proof.judge import Proof, Verdict

EXIT_UNDECIDED = 3


def prove(
    target: str,
    proof: str | None = None,
    model: str | None = None,
    base: Base = None,
    write: bool = False,
    prompt: Annotated[list[str] | None, typer.Option()] = None,
    api_key: Annotated[str, typer.Option(envvar="PEFTKIT_API_KEY")] = "",
    timeout: Annotated[float, typer.Option(min=1)] = 120.0,
    json_: Json = False,
) -> None:
    """Check that an adapter is applied where it runs.

    Exits with 0 if it is, 1 if not, and 3 if the answers do not decide it.

    Args:
        target (TARGET): URL of an OpenAI-compatible server (vLLM, SGLang, llama-server, Ollama, LM
            Studio, transformers serve, peftkit); folder or .gguf file of an adapter or of a merged
            model; or USER/NAME on the hub.
        proof (ADAPTER): Adapter folder with a proof.json, or the file. Default: the target's.
        model (NAME): Name of the model on the server.
        write: Write proof.json into an adapter's folder; the adapter may be from any program that
            writes PEFT's format.
        prompt (TEXT): With --write: a prompt to record instead of general ones; at most 4.
        api_key (KEY): Key of the server.
        timeout (SECONDS): Time limit of all requests to a server; at most 40 are sent.
    """
    from peftkit_cli.render import Renderer

    if not (is_url(target) or is_hub_id(target) or Path(target).expanduser().exists()):
        raise AdapterError(
            f"there is no folder or file '{target}' to prove.", found=neighbours(Path(target))
        )
    with Renderer(transient=True) as on_event:
        from peftkit.proof.files import prove_files

        if write:
            from peftkit.formats.open_adapter import open_adapter
            from peftkit.proof.record import write_proof

            opened = open_adapter(target, base, on_event=on_event)
            write_proof(opened, prompt or ())
            typer.echo(opened.file.folder / PROOF)
            return
        if is_url(target):
            if proof is None:
                fix = "Add --proof ADAPTER, the folder of the adapter with its proof.json."
                raise ConfigError("a server needs a proof to compare with.", fix=fix)
            from peftkit_cli.prove_server import prove_server

            verdict = prove_server(target, _proof_at(proof), model, api_key, timeout)
        else:
            verdict = prove_files(target, proof, base, on_event)
    if json_:
        typer.echo(json.dumps(verdict.as_dict(), indent=2))
    else:
        rows = [("target", target), ("method", verdict.method)]
        rows += [("evidence", text) for text in verdict.evidence]
        rows += [("to do", verdict.fix)] if verdict.fix else []
        lines = "\n".join([verdict.line, *(f"  {name:9} {text}" for name, text in rows)])
        typer.echo(wrapped(lines, sys.stdout))
    if not verdict.is_applied:
        raise typer.Exit(EXIT_UNDECIDED if verdict.kind == "undecided" else 1)


def note_proof(target: Path, adapter: str | Path, base: str | None = None) -> None:
    """Print the verdict on a file that another command wrote; a failure is only reported.

    Args:
        adapter: Its source. A merged model needs the proof of it.
    """
    from peftkit.formats.find_adapter import adapter_folder
    from peftkit.proof.files import prove_files

    folder = adapter_folder(adapter)
    is_model = (target.is_file() and target.suffix == ".gguf") or (target / "config.json").is_file()
    try:
        print_verdict(prove_files(target, folder, base))
    except Exception as error:  # a second copy of the model may not fit into memory
        if not is_model or (folder / PROOF).is_file():
            note(f"not proved: {_in_words(error)}")


def print_verdict(verdict: Verdict, name: str = "") -> None:
    """Print a verdict to stderr: one line if the adapter is applied, else also what to do."""
    more = "" if verdict.is_applied else f". {verdict.evidence[-1]}. {verdict.fix}"
    note(f"{name}{verdict.line}{more}")


def prove_served(url: str, proofs: Mapping[str, Path], key: str) -> None:
    """Print the verdict on each model of a server of this process, after it starts."""
    from peftkit.proof.record import read_proof
    from peftkit_cli.prove_server import prove_server

    for name, path in proofs.items():
        try:
            print_verdict(prove_server(url, read_proof(path), name, key), f"{name}: ")
        except Exception as error:  # ends the proof alone; the server runs
            note(f"{name}: not proved: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    from peftkit.execution.out_of_memory import one_line

    return str(error) if isinstance(error, PeftkitError) else one_line(error)


def _proof_at(path: str) -> Proof:
    from peftkit.proof.record import read_proof

    if is_hub_id(path):
        from peftkit.formats.find_adapter import adapter_folder

        return read_proof(adapter_folder(path))
    return read_proof(path)
