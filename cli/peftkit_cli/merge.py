"""`peftkit merge`: merge an adapter into its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from peftkit.formats.find_adapter import adapter_folder
from peftkit_cli.arguments import Adapter, Base, Force, note


def merge(
    adapter: Adapter,
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the model.")],
    base: Base = None,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(
            metavar="TYPE", help="Type of the weights: bf16, fp16, fp32. By default the base's."
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
    """Merge an adapter into its base, giving an ordinary model. Prints its folder."""
    folder = adapter_folder(adapter)
    from peftkit.merging.merge import merge as merge_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        merge_adapter(
            folder,
            out,
            base=base,
            dtype=dtype,
            from_quantized=from_quantized,
            force=force,
            overwrite=overwrite,
            on_event=on_event,
        )
    typer.echo(out)
    note(f"Next: load '{out}' in transformers, vLLM or llama.cpp's converter, like any model.")
