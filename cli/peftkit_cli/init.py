"""`peftkit init`: four questions, a recipe, and the next three commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peftkit.errors import ConfigError, OutputError, did_you_mean
from peftkit_cli.about import recipe_file
from peftkit_cli.arguments import note

HELD_OUT, FEWEST_TO_HOLD_OUT = 0.05, 100


@dataclass(frozen=True, slots=True)
class Goal:
    """A purpose of an adapter.

    Attributes:
        does: The purpose in words. recipe: The ready-made recipe to start from.
        small: A base that a CPU trains in minutes; "" if there is none.
    """

    does: str
    recipe: str
    small: str = "smollm2-135m"


ENCODER = "all-minilm-l6-v2"
GOALS = {
    "causal_lm": Goal("answer, chat, follow instructions, write text", "chat-sft"),
    "preference": Goal("prefer the better of two answers", "preference"),
    "kto": Goal("answer like the wanted answers, unlike the unwanted", "kto"),
    "sequence_classification": Goal("label texts", "text-classification", ENCODER),
    "token_classification": Goal("label words: names, places", "token-classification", ENCODER),
    "embedding": Goal("find texts that belong together", "embedding", ENCODER),
    "reward": Goal("score answers", "reward"),
    "seq2seq": Goal("turn a text into another, with T5 or BART", "seq2seq", ""),
    "masked_lm": Goal("get used to texts of a field, with BERT", "masked-lm", ENCODER),
    "image_classification": Goal("label images", "image-classification", ""),
    "image_text": Goal("answer questions about images", "read-digits", ""),
    "audio_text": Goal("answer questions about audio", "audio-chat", ""),
}
"""By task; kto is a loss of the task preference."""
LORA = "type: lora\n  rank: 16\n  alpha: 32\n  targets: [attention, ffn]"


def init(
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Rows to train on: a file or data set.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help=f"What to learn: {', '.join(GOALS)}.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Hub id, folder, .gguf or short name.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="GPU memory, such as 12GB; or cpu.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Recipe to write.")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a recipe for your data: four questions, or as many options. Prints its path."""
    if out.exists():
        raise OutputError(f"'{out}' exists already.", fix="Choose another name with --out.")
    data = data or _ask("--data", "Which file or data set has your rows?")
    num_rows, suited, fields = look_at(data)
    task = task or _ask("--task", _menu(suited), suited[0])
    if task not in GOALS:
        raise ConfigError(
            f"there is no task '{task}' here.",
            found=f"The tasks are: {', '.join(GOALS)}. {did_you_mean(task, GOALS)}".rstrip(),
        )
    memory = memory or _ask("--memory", "How much memory has your GPU (12GB)? Or: cpu", "cpu")
    on_cpu = memory.lower() == "cpu"
    usual = GOALS[task].small if on_cpu else _value(recipe_file(GOALS[task].recipe), "model")
    model = model or _ask("--model", "Which base model?", usual or None)
    text = recipe_text(
        task, data=data, model=model, on_cpu=on_cpu, num_rows=num_rows, fields=fields
    )
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"'{out}' cannot be written.", found=str(error)) from None
    typer.echo(out)
    memory_option = "" if on_cpu else f" --memory {memory}"
    commands = (f"check {out}", f"plan {out}{memory_option}", f"train {out}")
    note("Next: " + "\n      ".join(f"peftkit {command}" for command in commands))


def look_at(data: str) -> tuple[int, Sequence[str], Sequence[str]]:
    """Return the number of rows in a file, the tasks that they suit, and their fields."""
    from peftkit_cli.survey import survey

    summary = survey(data)
    tasks = ["kto" if "kto" in name else name for name in summary.tasks]
    suited = [name for name in tasks if name in GOALS] or ["causal_lm"]
    return summary.num_rows, suited, [field.name for field in summary.fields]


def recipe_text(
    task: str, *, data: str, model: str, on_cpu: bool, num_rows: int, fields: Sequence[str]
) -> str:
    """Return the ready-made recipe of a task for these rows and this base, commented."""
    goal = GOALS[task]
    source = recipe_file(goal.recipe)
    body = source.read_text(encoding="utf-8")
    body = body[re.search(r"(?m)^(?!#)", body).start() :]  # type: ignore[union-attr]
    body = _set(body, "model", model, "hub id, folder, .gguf file or short name")
    if on_cpu:
        body = re.sub(r"(?m)^  (?:quantize|dtype): .*\n", "", body)
    body = _set(body, "quantize", _value(source, "quantize"), "4 bits; none: 16 bits, if it fits")
    body = _set(body, "rank", None, "more learns more, and takes more memory")
    body = _set(body, "train", data, "")
    if num_rows >= FEWEST_TO_HOLD_OUT:
        body = _set(body, "eval", str(HELD_OUT), "this share of the rows is held out")
    else:
        body = re.sub(r"(?m)^  eval: .*\n", "", body)
    body = _set(body, "max_length", None, "tokens; longer rows are truncated")
    name = re.sub(r"\W+", "-", Path(data).stem).strip("-").lower() or "run"
    body = _set(body, "output_dir", f"runs/{name}", "the adapter, its checkpoints and its report")
    epochs = 5 if num_rows < 500 else 3 if num_rows < 5_000 else 1
    body = _set(body, "epochs", str(epochs), f"passes over the {num_rows:,} rows")
    body = body.replace("start_from: runs/chat", LORA)
    if task == "seq2seq" and "document" not in fields:
        body = re.sub(r"(?m)^  (?:source|target|prefix): .*\n", "", body)
    head = f"# To {goal.does}. Made by peftkit init from the recipe {goal.recipe}.\n"
    return f"{head}# All fields, with their defaults: peftkit schema\n{body}"


def _set(body: str, key: str, value: str | None, comment: str) -> str:
    """Set the value (None: unchanged) and the comment of a key, if the recipe has it."""

    def line(match: re.Match[str]) -> str:
        text = match[2] if value is None else value
        if value is not None and not re.fullmatch(r"[\w./-]+", value):
            text = "'" + value.replace("'", "''") + "'"
        return f"{match[1]}{text}" + (f"  # {comment}" if comment else "")

    return re.sub(rf"(?m)^(  {key}: )([^#\n]*?)(?: *#.*)?$", line, body, count=1)


def _value(recipe: Path, key: str) -> str:
    match = re.search(rf"(?m)^  {key}: (.+)$", recipe.read_text(encoding="utf-8"))
    return match[1] if match else "none"


def _menu(suited: Sequence[str]) -> str:
    names = [*suited, *(name for name in GOALS if name not in suited)]
    width = max(map(len, names))
    lines = (f"  {name:{width}}  {GOALS[name].does}" for name in names)
    return "\n".join(["What should it learn?", *lines, "Task"])


def _ask(option: str, question: str, default: str | None = None) -> str:
    """Ask on the terminal; without one the option is missing."""
    if not sys.stdin.isatty():
        raise ConfigError(
            f"peftkit init needs {option}.",
            found="There is no terminal to ask on.",
            fix=f"Add {option}; see peftkit init --help",
        )
    return str(typer.prompt(question, default=default, err=True))
