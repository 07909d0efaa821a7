"""`peftkit distill`: train an adapter to answer like the base with a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peftkit.events import EvalDone, Event, Listener, Notice, Table, to_all
from peftkit_cli.arguments import Overrides, Overwrite, Resume, note

if TYPE_CHECKING:
    from peftkit.recipe import Recipe

RECIPE, QUESTIONS = "distill.yaml", "questions.jsonl"
HELD_OUT = 0.25
"""Share of the questions that measures the agreement."""
NUM_EXAMPLES = 5


def distill(
    prompt: Annotated[Path, typer.Argument(show_default=False)],
    base: Annotated[str, typer.Option(show_default=False)],
    data: Annotated[str | None, typer.Option(show_default=False)] = None,
    out: Path = Path("runs/distilled"),
    questions: Annotated[int, typer.Option(min=16)] = 96,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Train an adapter that replaces a prompt.

    It answers like the base with the prompt. Prints the folder of the adapter.

    Args:
        prompt (PROMPT.md): Instructions, with examples under "## User" and "## Assistant"; or
            messages (.json, .jsonl).
        base (MODEL): Base model: hub id, folder, .gguf file or short name.
        data (FILE): Questions; answers are for comparison only. Default: the base writes them.
        out (DIR): Output folder.
        questions (N): Number of questions to generate without --data.
    """
    from peftkit_cli.render import Renderer

    with Renderer() as on_event:
        from peftkit.data.records import iterate_records
        from peftkit.report.page import LiveReport
        from peftkit.run import run
        from peftkit.tasks.distill.rows import read_prompt
        from peftkit.train.start import prepare_output

        read_prompt(prompt)  # fail before loading a model
        if data is not None:
            next(iterate_records(data))
        prepare_output(out, resume=resume, overwrite=overwrite)
        file = data or _questions_file(prompt, base, out / QUESTIONS, questions, on_event)
        recipe = _recipe(prompt, base, file, out, overrides or [])
        report, events = LiveReport(out, on_event), list[Event]()
        listener = to_all(on_event, report.on_event, events.append)
        result = run(recipe, resume=resume, overwrite=overwrite, on_event=listener)
    if result.is_main:
        evaluations = [event for event in events if isinstance(event, EvalDone)]
        for line in _improvements(evaluations, result.metrics):
            note(line)
        typer.echo(recipe.train.output_dir)
        note(f"Next: {recipe.task.command.format(folder=recipe.train.output_dir)}")


def _recipe(prompt: Path, base: str, data: str, out: Path, overrides: list[str]) -> Recipe:
    """Write the recipe into the folder of the run, and return it."""
    from peftkit.config.schema import dump_yaml, from_dict
    from peftkit.defaults import learning_rate_of
    from peftkit.files.disk import write_text
    from peftkit.recipe import Recipe, load
    from peftkit_cli.start.draft import size_of

    base_size = size_of(base)
    if base_size.notice:
        note(f"note: {base_size.notice}")
    spec: Mapping[str, Any] = {
        "task": {"type": "distill", "teacher": {"prompt": str(prompt)}, "answers": "teacher"},
        "base": {"model": base},
        "method": {"type": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {"train": data, "eval": HELD_OUT},
        "train": {
            "output_dir": str(out),
            "learning_rate": learning_rate_of(base_size.width),
            "eval_every": None,
            "eval_before": True,
            "eval_generate": 32,
        },
    }
    file = out / RECIPE
    write_text(dump_yaml(from_dict(Recipe, spec, "peftkit distill")), file)
    recipe = load(file, overrides)
    write_text(dump_yaml(recipe), file)
    note(f"Wrote the recipe {file}. To repeat the run: peftkit train {file}")
    return recipe


def _questions_file(prompt: Path, base: str, file: Path, number: int, on_event: Listener) -> str:
    """Return the file of questions; the base generates it if it is missing."""
    from peftkit.base.load import load_base
    from peftkit.evaluation.make_rows import make_questions
    from peftkit.files.disk import write_text
    from peftkit.tasks.distill.rows import read_prompt

    if not file.is_file():
        loaded = load_base(base, on_event=on_event)
        questions = make_questions(loaded, read_prompt(prompt), number, on_event=on_event)
        rows = [json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in questions]
        write_text("".join(rows), file)
    lines = file.read_text(encoding="utf-8").splitlines()
    examples = tuple((str(json.loads(line)["prompt"]),) for line in lines[:NUM_EXAMPLES])
    on_event(Table(f"{len(lines)} questions from the base: {file}", ("examples",), examples))
    on_event(Notice(f"Real questions of your users work better: --data FILE, or edit {file}."))
    return str(file)


def _improvements(evaluations: Sequence[EvalDone], metrics: Mapping[str, float]) -> Iterator[str]:
    names = {
        "agreement": "answers equal to the prompted base's",
        "same_token": "tokens equal to the prompted base's",
        "exact_match": "answers equal to the answers of the file",
    }
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    for name, label in names.items():
        if first is not None and last is not None and name in last.metrics:
            before = f"{first.metrics[name]:.0%} -> " if first.step == 0 else ""
            yield f"{label}: {before}{last.metrics[name]:.0%}"
    if saved := metrics.get("eval_tokens_saved"):
        yield f"tokens saved per request: {saved:,.0f}"
