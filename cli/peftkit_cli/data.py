"""`peftkit data`: what is in a file of rows, before any model is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftkit_cli.arguments import Json, note

if TYPE_CHECKING:
    from peftkit.data.survey import Survey, TokenFacts

BAR, NUM_BARS = 40, 12


def data(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file or data set of rows.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Count tokens with this model's tokenizer."),
    ] = None,
    max_length: Annotated[
        int, typer.Option(min=2, metavar="N", help="data.max_length: longer rows are truncated.")
    ] = 1024,
    chat_template: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="data.chat_template.")
    ] = None,
    hard_negatives: Annotated[
        str | None,
        typer.Option(metavar="ADAPTER", help="Find negatives with this embedding adapter."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where rows with negatives are written.")
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
        Literal["embedding", "reranker"], typer.Option("--for", help="The task of the rows.")
    ] = "embedding",
    as_json: Json = False,
) -> None:
    """Show what is in a data file: format, fields, duplicates and lengths in tokens."""
    if hard_negatives is not None:
        if out is None:
            raise typer.BadParameter("--hard-negatives needs --out FILE")
        _write_hard_negatives(file, hard_negatives, out, candidates, negatives, margin, kind)
        return
    from peftkit.data.chat import choose_template
    from peftkit.data.survey import survey
    from peftkit_cli.render import Renderer

    tokenizer = None
    with Renderer(transient=True) as on_event:
        if model is not None:
            from peftkit.base.locate import locate
            from peftkit.base.pretrained import reachable
            from peftkit.base.processors import load_tokenizer

            location = reachable(locate(model))
            tokenizer = load_tokenizer(location, on_event)
        template = choose_template(tokenizer, chat_template) if tokenizer is not None else None
        found = survey(file, tokenizer, template=template, max_length=max_length, on_event=on_event)
    if as_json:
        plain = asdict(found)
        if found.tokens is not None:
            plain["tokens"]["lengths"] = _quantiles(found.tokens)
        typer.echo(json.dumps(plain, indent=2))
        return
    _show(found)
    if model is None:
        note("To count tokens, name a model: --model smollm2-135m")


def _write_hard_negatives(
    file: str,
    adapter: str,
    out: Path,
    candidates: str | None,
    number: int,
    margin: float,
    kind: Literal["embedding", "reranker"],
) -> None:
    from peftkit.formats.open_adapter import open_adapter
    from peftkit.inference.hard_negatives import find_hard_negatives
    from peftkit.inference.predict import write_rows
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        found = find_hard_negatives(
            open_adapter(adapter, on_event=on_event),
            file,
            candidates=candidates,
            number=number,
            margin=margin,
            task=kind,
            on_event=on_event,
        )
        write_rows(found.rows, out, on_event=on_event)


def _show(found: Survey) -> None:
    from peftkit.report.figures import count
    from peftkit.tasks.rows import named
    from peftkit_cli.render import print_table

    lines = [
        ("rows", f"{found.num_rows:,}"),
        ("format", found.format or "none of causal_lm's"),
        *([("mixed", f"{found.mixed}: give rows of one format")] if found.mixed else []),
        ("fits the task", ", ".join(found.tasks) or "none by these names; see docs/data.md"),
        ("duplicates", f"{found.num_duplicates:,}"),
    ]
    if (tokens := found.tokens) is not None:
        total = sum(tokens.lengths)
        lines += [
            ("cut", f"{tokens.num_cut:,}"),
            ("nothing to learn", named(tokens.dropped)),
            ("tokens of an epoch", f"{count(total)}, of which {count(tokens.num_targets)} learnt"),
            ("tokens of a row", ", ".join(f"{k} {v:,}" for k, v in _quantiles(tokens).items())),
        ]
    print_table(f"Data: {found.where}", ("", ""), lines)
    rows = [
        (
            field.name,
            f"{field.num_rows:,}",
            f"{field.num_empty:,}",
            f"{field.mean_chars:,.0f}",
            ", ".join(f"{script} {share:.0%}" for script, share in field.scripts.items()) or "-",
        )
        for field in found.fields
    ]
    print_table("Fields", ("field", "rows", "empty", "mean characters", "scripts"), rows)
    if tokens is not None and tokens.lengths:
        _histogram(tokens)


def _histogram(tokens: TokenFacts) -> None:
    """Print how many rows are how long, a bar for each span of tokens."""
    low, high = min(tokens.lengths), max(tokens.lengths)
    width = max(1, -(-(high - low + 1) // NUM_BARS))
    counts = [0] * (-(-(high - low + 1) // width))
    for length in tokens.lengths:
        counts[(length - low) // width] += 1
    most = max(counts)
    for number, many in enumerate(counts):
        first = low + number * width
        bar = "█" * round(BAR * many / most)
        typer.echo(f"{first:>7,} to {first + width - 1:<7,} {bar} {many:,}")


def _quantiles(tokens: TokenFacts) -> dict[str, int]:
    lengths = sorted(tokens.lengths)
    if not lengths:
        return {}
    last = len(lengths) - 1
    places = {"shortest": 0.0, "median": 0.5, "95 %": 0.95, "longest": 1.0}
    return {name: lengths[round(share * last)] for name, share in places.items()}
