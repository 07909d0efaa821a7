"""`peftkit init`: write a recipe from the answers to a few questions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from peftkit.errors import ConfigError, OutputError, PeftkitError
from peftkit.events import Stage
from peftkit_cli.about import write_recipe
from peftkit_cli.arguments import note
from peftkit_cli.start.draft import (
    checked_task,
    draft,
    field_names,
    longest_fields,
    memory_bytes,
    suited_tasks,
    usual_fields,
    usual_model,
)
from peftkit_cli.start.recipes import GOALS

if TYPE_CHECKING:
    from peftkit_cli.start.survey import Survey

FEW = 50
Parsed = TypeVar("Parsed")


def init(
    data: str | None = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help=f"Task to train: {', '.join(GOALS)}.")
    ] = None,
    model: str | None = None,
    memory: str | None = None,
    fields: str | None = None,
    out: Path = Path("recipe.yaml"),
) -> None:
    """Write a recipe for your data, from four questions.

    Options answer the questions in advance. Prints the path of the recipe.

    Args:
        data (FILE): Training data: a file, folder or data set.
        model (MODEL): Base model: hub id, folder, .gguf or short name.
        memory (SIZE): GPU memory, such as 12GB; or cpu.
        fields (INPUT,TARGET): Names of the input and the target field, if they are not standard.
        out (FILE): Recipe to write.
    """
    if out.exists():
        raise OutputError(f"'{out}' exists already.", fix="Choose another name with --out.")
    from peftkit_cli.render import Renderer

    with Renderer(transient=True):
        from peftkit_cli.start.survey import only_data_file, splits_of, survey

    def read_data(where: str) -> tuple[str, Survey]:
        path = Path(where)
        splits = splits_of(path) if path.is_dir() else {}
        if path.is_file() and splits_of(path.parent).get("train") == str(path):
            splits = splits_of(path.parent)
        file, held_out = splits.get("train", where), splits.get("eval", "")
        if path.is_dir() or held_out:
            note(f"Training data: {file}; evaluation data: {held_out or 'a share of it'}.")
        return held_out, survey(file)

    held_out, summary = _answer(
        data, "--data", "Which file has your rows?", read_data, only_data_file(Path())
    )
    suited = suited_tasks(summary)
    task = _answer(
        task, "--task", _menu(suited), lambda name: checked_task(name, suited, summary), suited[0]
    )
    named = _named_fields(fields, task, summary)
    question = "How much memory does your GPU have (such as 12GB)? Without a GPU: cpu"
    memory, num_bytes = _answer(
        memory, "--memory", question, lambda size: (size, memory_bytes(size)), "cpu"
    )
    default = usual_model(task, on_gpu=bool(num_bytes))
    model = _answer(model, "--model", "Which base model?", str, default or None)
    with Renderer(transient=True) as on_event:
        on_event(Stage(f"Reading the config and the tokenizer of {model}"))
        text, notice = draft(summary, task, model, num_bytes, held_out=held_out, named=named)
    if notice:
        note(f"note: {notice}")
    write_recipe(out, text)
    typer.echo(out)
    if summary.num_rows < FEW and GOALS[task].by_rules:
        note(f"note: {summary.num_rows:,} rows are few; a few hundred are a good start.")
    memory_option = f" --memory {shlex.quote(memory)}" if num_bytes else ""
    quoted = shlex.quote(str(out))
    commands = (f"check {quoted}", f"plan {quoted}{memory_option}", f"train {quoted}")
    note("Next: " + "\n      ".join(f"peftkit {command}" for command in commands))


def _named_fields(fields: str | None, task: str, summary: Survey) -> tuple[str, ...]:
    """Return the input field and the target field if the recipe must name them; else ().

    If the recipe names a prompt and a completion, they become a chat.
    """
    settings, usual = GOALS[task].fields, usual_fields(task, summary)
    if fields is None and usual is not None:
        return usual

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        existing = {field.name for field in summary.fields}
        if len(names) != 2 or not existing.issuperset(names) or not settings:
            raise ConfigError(
                f"cannot use --fields {text}.",
                found=f"{summary.where} has the fields: {field_names(summary)}."
                + ("" if settings else f" The task {task} does not accept field names."),
                fix="Name two of them, with a comma: the input field and the target field.",
            )
        return names

    question = f"Fields: {field_names(summary)}\nWhich are input and target (with a comma)?"
    default = ",".join(longest_fields(summary))
    return _answer(fields, "--fields INPUT,TARGET", question, parse, default)


def _menu(suited: Sequence[str]) -> str:
    """Return the question for the task, with the suited tasks (the most likely first)."""
    width = max(map(len, suited))
    lines = (f"  {name:{width}}  {GOALS[name].does}" for name in suited)
    return "\n".join(["What should the adapter do?", *lines, "Task"])


def _answer(
    value: str | None,
    option: str,
    question: str,
    parse: Callable[[str], Parsed],
    default: str | None = None,
) -> Parsed:
    """Parse the value of an option, or prompt for it until the answer is valid.

    Raises:
        PeftkitError: The value is invalid, or missing without a terminal.
    """
    if value is not None:
        return parse(value)
    if not sys.stdin.isatty():
        raise ConfigError(
            f"peftkit init needs {option}.",
            found="There is no terminal for its question.",
            fix=f"Add {option}; see peftkit init --help",
        )
    suffix = " " if default is None else ": "
    while True:
        text = typer.prompt(
            question,
            default=default or "",
            show_default=bool(default),
            err=True,
            prompt_suffix=suffix,
        )
        if not text:
            note("Please type an answer; Ctrl-C quits.")
            continue
        try:
            return parse(str(text))
        except PeftkitError as error:
            note(str(error))
