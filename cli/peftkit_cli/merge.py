"""`peftkit merge`: an adapter folded into its base, a folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peftkit.errors import ConfigError
from peftkit.formats.find_adapter import adapter_folder
from peftkit_cli.arguments import Adapter, Base, Force, note

Dtype = Literal["bf16", "fp16", "fp32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
FLOATS = ("bf16", "fp16", "fp32")


def merge(
    adapter: Adapter,
    out: Annotated[
        Path, typer.Option(metavar="PATH", help="New folder for the model; with --into, a file.")
    ],
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="BASE.gguf", help="Merge into this GGUF file of the base; write a new file."
        ),
    ] = None,
    base: Base = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the merged weights: bf16, fp16, fp32; with --into also q8_0, q5_1, "
            "q5_0, q4_1, q4_0. By default the base's.",
        ),
    ] = None,
    force: Force = False,
    from_quantized: Annotated[
        bool,
        typer.Option(
            "--from-quantized",
            help="Merge into the quantised weights used in training instead of the originals.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model that is there.")
    ] = False,
) -> None:
    """Merge an adapter into its base, giving an ordinary model. Prints its path."""
    if into is not None and from_quantized:
        raise ConfigError(
            "--from-quantized cannot be used with --into",
            found="the weights of a GGUF file are merged into as they are",
            fix="Leave it out.",
        )
    if into is None and dtype not in (None, *FLOATS):
        raise ConfigError(
            f"a transformers folder has no {dtype} weights",
            fix="Merge into a GGUF file: --into BASE.gguf. Or choose bf16, fp16 or fp32.",
        )
    folder = adapter_folder(adapter)
    from peftkit.merging.into_gguf import merge_into_gguf
    from peftkit.merging.merge import merge as merge_adapter
    from peftkit_cli.render import Renderer

    how: dict[str, Any] = {"base": base, "dtype": dtype, "force": force, "overwrite": overwrite}
    with Renderer() as on_event:
        if into is None:
            merge_adapter(folder, out, **how, from_quantized=from_quantized, on_event=on_event)
        else:
            merge_into_gguf(folder, into, out, **how, on_event=on_event)
    typer.echo(out)
    if into is None:
        note(f"Next: load '{out}' in transformers, vLLM or llama.cpp's converter, like any model.")
    else:
        note(f"Next: llama-server -m '{out}'")
