"""`peftkit init`: a few questions, a recipe, and the next three commands."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peftkit.errors import ConfigError, OutputError, PeftkitError, did_you_mean, first_few
from peftkit_cli.about import recipe_file, write_recipe
from peftkit_cli.arguments import note
from peftkit_cli.goals import GOALS, menu

if TYPE_CHECKING:
    from peftkit.defaults import Defaults
    from peftkit_cli.survey import Survey

HELD_OUT, FEWEST_TO_HOLD_OUT = 0.05, 100
CHARACTERS_PER_TOKEN = 4
LEAST_ROOM = 3
"""A base stays in 16 bits where a GPU has so many times the bytes of its weights."""


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
    fields: Annotated[
        str | None,
        typer.Option(metavar="READ,LEARNT", help="Names of the two fields, if they are your own."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Recipe to write.")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a recipe for your data: four questions, or as many options. Prints its path."""
    if out.exists():
        raise OutputError(f"'{out}' exists already.", fix="Choose another name with --out.")
    data = data or _ask("--data", "Which file or data set has your rows?")
    from peftkit_cli.survey import survey

    summary = survey(data)
    suited = suited_tasks(summary)
    task = _checked_task(task or _ask("--task", menu(suited), suited[0]), suited, summary)
    named = _named_fields(fields, task, summary)
    memory = memory or _ask("--memory", "How much memory has your GPU (12GB)? Or: cpu", "cpu")
    num_bytes = _memory_bytes(memory)
    goal = GOALS[task]
    recipe_base = goal.base or _value(recipe_file(goal.recipe), "model")
    usual = recipe_base if num_bytes else goal.small
    model = model or _ask("--model", "Which base model?", usual or None)
    width, num_parameters = size_of(model)
    text = recipe_text(
        task,
        data=data,
        model=model,
        on_cpu=not num_bytes,
        num_rows=summary.num_rows,
        fields=[field.name for field in summary.fields],
        named=named,
        num_tokens=summary.num_chars // CHARACTERS_PER_TOKEN,
        width=width,
        quantize=None if num_bytes >= 2 * LEAST_ROOM * num_parameters > 0 else "nf4",
    )
    write_recipe(out, text)
    typer.echo(out)
    memory_option = f" --memory {shlex.quote(memory)}" if num_bytes else ""
    quoted = shlex.quote(str(out))
    commands = (f"check {quoted}", f"plan {quoted}{memory_option}", f"train {quoted}")
    note("Next: " + "\n      ".join(f"peftkit {command}" for command in commands))


def suited_tasks(summary: Survey) -> list[str]:
    """Return the tasks that rows suit; of fields with unknown names those that can name them.

    Raises:
        ConfigError: They suit none.
    """
    tasks = ["kto" if "kto" in name else name for name in summary.tasks]
    tasks = [name for name in tasks if name in GOALS]
    if not tasks and not summary.wrong and len(summary.fields) > 1:
        tasks = [name for name, goal in GOALS.items() if goal.fields]
    if tasks:
        return tasks
    raise ConfigError(
        f"the rows of {summary.where} suit no task.",
        found=summary.wrong or f"Their fields: {_listed(summary)}.",
        fix="Rows to copy for each task are in docs/data.md.",
    )


def _checked_task(task: str, suited: Sequence[str], summary: Survey) -> str:
    if task not in GOALS:
        raise ConfigError(
            f"there is no task '{task}' here.",
            found=f"The tasks are: {', '.join(GOALS)}. {did_you_mean(task, GOALS)}".rstrip(),
        )
    if task not in suited:
        raise ConfigError(
            f"the rows of {summary.where} do not suit the task {task}.",
            found=f"Their fields: {_listed(summary)}; they suit: {', '.join(suited)}.",
            fix="Rows to copy for each task are in docs/data.md.",
        )
    return task


def _named_fields(fields: str | None, task: str, summary: Survey) -> tuple[str, str] | None:
    """Return the fields that are read and learnt, where the task does not know their names."""
    settings = GOALS[task].fields
    if fields is None and (summary.tasks or not settings):
        return None
    present = [field.name for field in summary.fields]
    if fields is None:
        listed = ", ".join(present)
        first = _ask("--fields READ,LEARNT", f"Fields: {listed}\nWhich one is read?", present[0])
        rest = next((name for name in present if name != first), present[0])
        fields = f"{first},{_ask('--fields READ,LEARNT', 'Which one is learnt?', rest)}"
    names = [name.strip() for name in fields.split(",")]
    absent = [name for name in names if name not in present]
    if len(names) != 2 or absent or not settings:
        raise ConfigError(
            f"cannot use --fields {fields}.",
            found=f"{summary.where} has the fields: {_listed(summary)}."
            + ("" if settings else f" The task {task} takes no names of fields."),
            fix="Name two of them: the field that is read, a comma, the field that is learnt.",
        )
    return names[0], names[1]


def _listed(summary: Survey) -> str:
    return first_few([field.name for field in summary.fields], 8, ", ") or "none"


def _memory_bytes(memory: str) -> int:
    """Return a GPU's bytes; 0 for a CPU."""
    if memory.strip().lower() == "cpu":
        return 0
    from peftkit.planning.plan import parse_size

    try:
        return parse_size(memory)
    except ConfigError:
        raise ConfigError(
            f"cannot use --memory {memory!r}.",
            found="It is neither a size above zero nor cpu.",
            fix="Write the GPU's memory as 8GB, 24GB or 7.5GiB; without a GPU: cpu.",
        ) from None


def size_of(model: str) -> tuple[int | None, int]:
    """Return a base's hidden size and number of parameters; None and 0 if it is not at hand."""
    from peftkit.base.purpose import CAUSAL_LM
    from peftkit.base.skeleton import on_meta, read_config

    try:
        config = read_config(model, None, CAUSAL_LM)
    except PeftkitError as error:  # it may come later, or from another machine
        note(f"note: {error.asked} {error.fix}")
        return None, 0
    text = config.get_text_config()
    width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
    try:
        return width, sum(p.numel() for p in on_meta(config, CAUSAL_LM).parameters())
    except Exception:  # no causal model: the recipe's bits stay
        return width, 0


def recipe_text(
    task: str,
    *,
    data: str,
    model: str,
    on_cpu: bool,
    num_rows: int,
    fields: Sequence[str],
    named: tuple[str, str] | None = None,
    num_tokens: int = 0,
    width: int | None = None,
    quantize: str | None = "nf4",
) -> str:
    """Return the ready-made recipe of a task for these rows and this base, commented.

    Args:
        fields: Of the rows. named: Those that are read and learnt, by names of their own.
        num_tokens: Of all rows, about.
        width: Hidden size of the base, if it is known.
        quantize: Bits of the base on a GPU; None: 16.
    """
    from peftkit.defaults import BATCHES, CONTRASTS, defaults_for

    goal = GOALS[task]
    source = recipe_file(goal.recipe)
    body = source.read_text(encoding="utf-8")
    body = body[re.search(r"(?m)^(?!#)", body).start() :]  # type: ignore[union-attr]
    if goal.section:
        body = re.sub(r"(?m)\Atask:.*\n(?:  .*\n)*", f"task: {goal.section}\n", body)
    body = _set(body, "model", model, "hub id, folder, .gguf file or short name")
    if on_cpu:
        body = re.sub(r"(?m)^  (?:quantize|dtype): .*\n", "", body)
    elif quantize is None:
        body = re.sub(r"(?m)^  quantize: .*\n", "", body)
    body = _set(body, "quantize", _value(source, "quantize"), "4 bits; none: 16 bits, if it fits")
    body = _set(body, "train", data, "")
    if num_rows >= FEWEST_TO_HOLD_OUT:
        body = _set(body, "eval", str(HELD_OUT), "this share of the rows is held out")
    else:
        body = re.sub(r"(?m)^  eval: .*\n", "", body)
    body = _set(body, "max_length", None, "tokens; longer rows are truncated")
    name = re.sub(r"\W+", "-", Path(data).stem).strip("-").lower() or "run"
    body = _set(body, "output_dir", f"runs/{name}", "the adapter, its checkpoints and its report")
    body = body.replace(
        "start_from: runs/chat", "type: lora\n  rank: 16\n  alpha: 32\n  targets: all-linear"
    )
    length = int(_value(source, "max_length", "1024"))
    settings = defaults_for(
        num_rows,
        num_tokens if task == "causal_lm" else 0,
        length,
        width,
        batches=CONTRASTS if task == "embedding" else BATCHES,
    )
    body = _with_defaults(body, task, settings, num_rows)
    if task == "seq2seq" and "document" not in fields:
        body = re.sub(r"(?m)^  (?:source|target|prefix): .*\n", "", body)
    if named is not None:
        body = _with_names(body, task, named)
    head = f"# To {goal.does}. Made by peftkit init from the recipe {goal.recipe}.\n"
    return f"{head}# All fields, with their defaults: peftkit schema\n{body}"


def _with_defaults(body: str, task: str, settings: Defaults, num_rows: int) -> str:
    """Set what follows from rows and base, where the task learns from its rows as they are."""
    by_rules = GOALS[task].by_rules
    body = _set(body, "rank", str(settings.rank) if by_rules else None, "how much it can learn")
    if by_rules:
        body = _set(body, "alpha", str(settings.alpha), "stays when the rank changes")
        rate = f"{settings.learning_rate:.1e}".replace("e-0", "e-")
        body = _set(body, "learning_rate", rate, "first thing to vary: a third, three times")
    if task == "causal_lm":
        packing = str(settings.packing).lower()
        comment = "several short rows in one; for few rows it leaves too few steps"
        body = re.sub(r"(?m)^  packing: .*\n", "", body)
        body = re.sub(r"(?m)^(  max_length: .*\n)", rf"\1  packing: {packing}  # {comment}\n", body)
    if task == "grpo":  # a step of many answers is what it learns from
        return body
    body = re.sub(r"(?m)^  gradient_accumulation: .*\n", "", body)
    what = "packed rows" if settings.packing else "rows"
    body = _set(body, "batch_size", str(settings.batch_size), f"{what} of an optimizer step")
    comment = f"passes over the {num_rows:,} rows: about {settings.num_steps:,} steps"
    return _set(body, "epochs", str(settings.epochs), comment)


def _with_names(body: str, task: str, named: tuple[str, str]) -> str:
    """Write the names of the fields into the task's section."""
    lines = [f"task:\n  type: {task}\n"]
    lines += [
        f"  {setting}: {_quoted(name)}\n"
        for setting, name in zip(GOALS[task].fields, named, strict=True)
    ]
    return re.sub(r"(?m)\Atask:.*\n(?:  .*\n)*", lambda _: "".join(lines), body)


def _set(body: str, key: str, value: str | None, comment: str) -> str:
    """Set the value (None: unchanged) and the comment of a key, if the recipe has it."""

    def line(match: re.Match[str]) -> str:
        text = match[2] if value is None else _quoted(value)
        return f"{match[1]}{text}" + (f"  # {comment}" if comment else "")

    return re.sub(rf"(?m)^(  {key}: )([^#\n]*?)(?: *#.*)?$", line, body, count=1)


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "''") + "'"


def _value(recipe: Path, key: str, default: str = "none") -> str:
    match = re.search(rf"(?m)^  {key}: (.+)$", recipe.read_text(encoding="utf-8"))
    return match[1] if match else default


def _ask(option: str, question: str, default: str | None = None) -> str:
    """Ask on the terminal; without one the option is missing."""
    if not sys.stdin.isatty():
        raise ConfigError(
            f"peftkit init needs {option}.",
            found="There is no terminal to ask on.",
            fix=f"Add {option}; see peftkit init --help",
        )
    return str(typer.prompt(question, default=default, err=True))
