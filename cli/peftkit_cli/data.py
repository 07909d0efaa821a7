"""`peftkit data`: show the contents of a data file, without loading a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftkit_cli.arguments import Json, note

if TYPE_CHECKING:
    from peftkit_cli.survey import Survey


def data(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file or data set of rows.")],
    hard_negatives: Annotated[
        str | None,
        typer.Option(metavar="ADAPTER", help="Find negatives with this embedding adapter."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rows with negatives here.")
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="More texts to choose negatives from (field: text)."),
    ] = None,
    negatives: Annotated[int, typer.Option(min=1, metavar="N", help="Negatives of each row.")] = 5,
    margin: Annotated[
        float,
        typer.Option(min=0, max=1, help="How much farther than the positive a negative is."),
    ] = 0.05,
    kind: Annotated[
        Literal["embedding", "reranker"], typer.Option("--for", help="Task that the rows are for.")
    ] = "embedding",
    as_json: Json = False,
) -> None:
    """Show the content of a data file: format, fields and duplicates."""
    if hard_negatives is not None:
        if out is None:
            raise typer.BadParameter("--hard-negatives needs --out FILE")
        _write_hard_negatives(file, hard_negatives, out, candidates, negatives, margin, kind)
        return
    from peftkit_cli.survey import splits_of, survey

    splits = splits_of(Path(file)) if Path(file).is_dir() else {}
    summary = survey(splits.get("train", file))
    if as_json:
        typer.echo(json.dumps(asdict(summary), indent=2))
        return
    _show(summary)
    if held_out := splits.get("eval"):
        note(f"To evaluate on (data.eval): {held_out}")
    note("Tokens are counted by: peftkit check RECIPE")


def _write_hard_negatives(
    file: str,
    adapter: str,
    out: Path,
    candidates: str | None,
    number: int,
    margin: float,
    kind: Literal["embedding", "reranker"],
) -> None:
    from peftkit.evaluation.make_rows import find_hard_negatives
    from peftkit.evaluation.predict import write_rows
    from peftkit.formats.open_adapter import open_adapter
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        mined = find_hard_negatives(
            open_adapter(adapter, on_event=on_event),
            file,
            candidates=candidates,
            number=number,
            margin=margin,
            task=kind,
            on_event=on_event,
        )
        write_rows(mined.rows, out, on_event=on_event)


def _wrong(summary: Survey) -> str:
    return f"{summary.num_wrong:,} of {summary.num_rows:,} rows; the first: {summary.wrong}"


def _no_task(summary: Survey) -> str:
    if summary.wrong:
        return "none as they are"
    return "none by these names; peftkit init --fields READ,LEARNT names two; see docs/data.md"


def _show(summary: Survey) -> None:
    from peftkit_cli.render import print_table

    lines = [
        ("rows", f"{summary.num_rows:,}"),
        ("format", summary.format or "none of causal_lm's"),
        *([("mixed", f"{summary.mixed}: give rows of one format")] if summary.mixed else []),
        *([("cannot be read", _wrong(summary))] if summary.wrong else []),
        ("fits the task", ", ".join(summary.tasks) or _no_task(summary)),
        ("duplicates", f"{summary.num_duplicates:,}"),
        *([("useless pairs", _useless(summary))] if summary.num_useless else []),
    ]
    print_table(f"Data: {summary.where}", ("", ""), lines)
    rows = [
        (field.name, f"{field.num_rows:,}", f"{field.num_empty:,}", f"{field.mean_chars:,.0f}")
        for field in summary.fields
    ]
    print_table("Fields", ("field", "rows", "empty", "mean characters"), rows)


def _useless(summary: Survey) -> str:
    where = Path(summary.first_useless).name
    return f"{summary.num_useless:,}: an empty answer, or two equal ones; first {where}"
