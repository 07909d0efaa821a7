"""`peftkit merge`: an adapter folded into its base."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from peftkit.formats.find_adapter import adapter_folder
from peftkit_cli.arguments import Adapter, Base, Force, note


class Dtype(str, Enum):
    """Names that --dtype takes."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def merge(
    adapter: Adapter,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="A new folder for the model.", show_default=False),
    ],
    base: Base = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="dtype of the merged weights; by default the base's.", show_default=False
        ),
    ] = None,
    force: Force = False,
    from_quantized: Annotated[
        bool,
        typer.Option(
            "--from-quantized",
            help="Merge into the quantised weights used in training, not into the original ones.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model in that folder.")
    ] = False,
) -> None:
    """Merge an adapter into its base, which gives an ordinary model. Prints its folder."""
    folder = adapter_folder(adapter)
    from peftkit.merging.merge import merge as merge_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        merge_adapter(
            folder,
            out,
            base=base,
            dtype=None if dtype is None else dtype.value,
            force=force,
            from_quantized=from_quantized,
            overwrite=overwrite,
            on_event=on_event,
        )
    typer.echo(out)
    note(f"Next: load '{out}' in transformers, vLLM or llama.cpp's converter as any model.")
