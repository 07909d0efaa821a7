"""`peftkit data`: describe a data file, without loading a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftkit_cli.arguments import Json, note

if TYPE_CHECKING:
    from peftkit_cli.start.survey import Survey


def data(
    file: str,
    hard_negatives: str | None = None,
    out: Path | None = None,
    candidates: str | None = None,
    negatives: Annotated[int, typer.Option(min=1)] = 5,
    margin: Annotated[float, typer.Option(min=0, max=1)] = 0.05,
    kind: Annotated[Literal["embedding", "reranker"], typer.Option("--for")] = "embedding",
    as_json: Json = False,
) -> None:
    """Show the format, fields and duplicates of a data file.

    Args:
        file (FILE): A data file, folder or data set.
        hard_negatives (ADAPTER): Mine hard negatives with this embedding adapter.
        out (FILE): Write the rows with negatives here.
        candidates (FILE): Additional texts as candidates (field: text).
        negatives (N): Negatives per row.
        margin: How much less similar than the positive a negative must be.
        kind: Task to write the rows for.
    """
    from peftkit_cli.render import Renderer

    if hard_negatives is not None:
        if out is None:
            raise typer.BadParameter("--hard-negatives needs --out FILE")
        from peftkit.data.records import check_exists
        from peftkit.evaluation.make_rows import find_hard_negatives
        from peftkit.evaluation.predict import write_rows
        from peftkit.formats.open_adapter import open_adapter

        check_exists(*filter(None, (file, candidates)))
        with Renderer() as on_event:
            mined = find_hard_negatives(
                open_adapter(hard_negatives, on_event=on_event),
                file,
                candidates=candidates,
                number=negatives,
                margin=margin,
                task=kind,
                on_event=on_event,
            )
            write_rows(mined.rows, out, on_event=on_event)
        return
    with Renderer(transient=True):
        from peftkit_cli.start.survey import splits_of, survey

        splits = splits_of(Path(file)) if Path(file).is_dir() else {}
        summary = survey(splits.get("train", file))
    if as_json:
        typer.echo(json.dumps(asdict(summary), indent=2))
        return
    _show(summary)
    if held_out := splits.get("eval"):
        note(f"Evaluation data (data.eval): {held_out}")
    note("To count tokens: peftkit check RECIPE")


def _show(summary: Survey) -> None:
    from peftkit_cli.render import print_table

    no_task = "none: the rows are invalid"
    if not summary.wrong:
        no_task = "none for these fields; name two: peftkit init --fields INPUT,TARGET"
    lines = [("rows", f"{summary.num_rows:,}"), ("format", summary.format or "none of causal_lm's")]
    if summary.mixed:
        lines.append(("mixed", f"{summary.mixed}; all rows must have one format"))
    if summary.wrong:
        invalid = f"{summary.num_wrong:,} of {summary.num_rows:,}; the first: {summary.wrong}"
        lines.append(("invalid rows", invalid))
    lines.append(("fits the task", ", ".join(summary.tasks) or no_task))
    lines.append(("duplicates", f"{summary.num_duplicates:,}"))
    if summary.num_useless:
        useless = f"{summary.num_useless:,}: an empty answer, or two equal ones; first "
        lines.append(("useless pairs", useless + Path(summary.first_useless).name))
    print_table(f"Data: {summary.where}", ("", ""), lines)
    rows = [
        (field.name, f"{field.num_rows:,}", f"{field.num_empty:,}", f"{field.mean_chars:,.0f}")
        for field in summary.fields
    ]
    print_table("Fields", ("field", "rows", "empty", "mean characters"), rows)
