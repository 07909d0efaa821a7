"""`peftkit distill`: a prompt becomes an adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peftkit.events import EvalDone, Event, Listener, Notice, Table, to_all
from peftkit_cli.arguments import Overrides, Overwrite, Resume, note

if TYPE_CHECKING:
    from peftkit.run.config import Recipe

RECIPE, QUESTIONS = "distill.yaml", "questions.jsonl"
HELD_OUT = 0.25
"""Of the questions: what agreement is measured on."""
SHOWN = 5


def distill(
    prompt: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPT.md",
            help='Instructions, with examples under "## User" and "## Assistant"; or messages '
            "(.json, .jsonl).",
            show_default=False,
        ),
    ],
    base: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Base model: hub id, folder, .gguf file or short name.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Questions; answers in it are only compared with. Without it the base makes some.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder.")] = Path(
        "runs/distilled"
    ),
    questions: Annotated[
        int, typer.Option(min=16, metavar="N", help="Questions to make where --data has none.")
    ] = 96,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Turn a prompt into an adapter that answers as the base does with it. Prints its folder."""
    from peftkit.data.load import iterate_records
    from peftkit.recipe import run
    from peftkit.report.page import LiveReport
    from peftkit.tasks.distill.prompt import read_prompt
    from peftkit.train.checkpoints.checkpoint import StartPolicy, prepare_output
    from peftkit_cli.render import Renderer

    read_prompt(prompt)  # before anything heavy
    if data is not None:
        next(iterate_records(data))
    prepare_output(out, StartPolicy(resume, overwrite))
    with Renderer() as on_event:
        file = data or _made(prompt, base, out / QUESTIONS, questions, on_event)
        recipe = _recipe(prompt, base, file, out, overrides or [])
        report, events = LiveReport(out, on_event), list[Event]()
        listener = to_all(on_event, report.on_event, events.append)
        result = run(recipe, resume=resume, overwrite=overwrite, on_event=listener)
    if result.is_main:
        evaluations = [event for event in events if isinstance(event, EvalDone)]
        for line in _reached(evaluations, result.metrics):
            note(line)
        typer.echo(recipe.train.output_dir)
        note(f"Next: {recipe.task.command.format(folder=recipe.train.output_dir)}")


def _recipe(prompt: Path, base: str, data: str, out: Path, overrides: list[str]) -> Recipe:
    """Write the recipe beside the run, and return it."""
    from peftkit.config.schema import dump_yaml, from_dict
    from peftkit.files.disk import write_text
    from peftkit.run.config import Recipe, load

    spec: Mapping[str, Any] = {
        "task": {"type": "distill", "teacher": {"prompt": str(prompt)}, "answers": "teacher"},
        "base": {"model": base},
        "method": {"type": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {"train": data, "eval": HELD_OUT},
        "train": {
            "output_dir": str(out),
            "learning_rate": 1e-3,
            "eval_every": None,
            "eval_before": True,
            "eval_generate": 32,
        },
    }
    file = out / RECIPE
    write_text(dump_yaml(from_dict(Recipe, spec, "peftkit distill")), file)
    recipe = load(file, overrides)
    write_text(dump_yaml(recipe), file)
    note(f"The recipe is {file}: peftkit train {file} does the same.")
    return recipe


def _made(prompt: Path, base: str, file: Path, number: int, on_event: Listener) -> str:
    """Return a file of questions that the base made, now or before, and show the first."""
    from peftkit.base.load import load_base
    from peftkit.files.disk import write_text
    from peftkit.run.questions import make_questions
    from peftkit.tasks.distill.prompt import read_prompt

    if not file.is_file():
        loaded = load_base(base, on_event=on_event)
        made = make_questions(loaded, read_prompt(prompt), number, on_event=on_event)
        rows = [json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in made]
        write_text("".join(rows), file)
    lines = file.read_text(encoding="utf-8").splitlines()
    shown = tuple((str(json.loads(line)["prompt"]),) for line in lines[:SHOWN])
    on_event(Table(f"{len(lines)} questions of the base: {file}", ("the first",), shown))
    on_event(Notice(f"Questions of your users teach more: --data FILE. Or edit {file}."))
    return str(file)


def _reached(evaluations: Sequence[EvalDone], metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield what was reached, in words: of the first and the last evaluation."""
    names = {
        "agreement": "whole answers equal to the prompted base's",
        "same_token": "tokens on which both agree",
        "exact_match": "answers equal to the file's own",
    }
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    for name, words in names.items():
        if first is not None and last is not None and name in last.metrics:
            before = f"{first.metrics[name]:.0%} -> " if first.step == 0 else ""
            yield f"{words}: {before}{last.metrics[name]:.0%}"
    if saved := metrics.get("eval_tokens_saved"):
        yield f"tokens saved per request: {saved:,.0f}"
