"""`peftkit base`: quantised bases in the cache."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from peftkit_cli.arguments import Json, note

base = typer.Typer(
    help="Quantised bases in the cache: list, remove or add one.", no_args_is_help=True
)


@base.command("ls")
def list_(as_json: Json = False) -> None:
    """List the packed bases: their sizes, and any problem with them."""
    from peftkit.base.store import store_folder, stored_bases
    from peftkit.figures import size
    from peftkit_cli.render import print_table

    stored = stored_bases()
    if as_json:
        names = ("model", "quantize", "dtype", "num_bytes", "problem")
        facts = [{"name": e.folder.name, **{n: getattr(e, n) for n in names}} for e in stored]
        typer.echo(json.dumps(facts, indent=2))
        return
    rows = tuple(
        (e.folder.name, e.model, e.quantize, e.dtype, size(e.num_bytes), e.problem) for e in stored
    )
    if rows:
        columns = ("name", "model", "quantize", "dtype", "size", "problem")
        print_table("", columns, rows)
    total = size(sum(each.num_bytes for each in stored))
    number = f"{len(stored)} packed base{'' if len(stored) == 1 else 's'}"
    how = "" if stored else " Pack one with: peftkit base pack MODEL"
    note(f"{number} in {store_folder()}, {total} in all.{how}")


@base.command("rm")
def remove(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name or model, as `base ls` shows it.")
    ],
) -> None:
    """Remove packed bases. The original models stay."""
    from peftkit.base.store import remove_stored
    from peftkit.figures import size

    for each in remove_stored(name):
        note(f"Removed {each.folder.name} ({size(each.num_bytes)}).")


@base.command("pack")
def pack(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub id, folder or short name."),
    ],
    quantize: Annotated[str, typer.Option(metavar="KIND", help="nf4, fp4 or int8.")] = "nf4",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="bf16, fp16, fp32, auto.")] = "auto",
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit.")
    ] = None,
) -> None:
    """Quantise a base into the cache, so that runs on it start in seconds."""
    from peftkit.base.load import pack_base
    from peftkit_cli.render import Renderer

    with Renderer() as listener:
        folder = pack_base(
            model, quantize=quantize, dtype=dtype, revision=revision, on_event=listener
        )
    typer.echo(str(folder))
