"""`peftkit init`: a few questions, a recipe, and the next three commands."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from peftkit.errors import ConfigError, OutputError, PeftkitError, did_you_mean, first_few
from peftkit_cli.about import recipe_file, write_recipe
from peftkit_cli.arguments import note
from peftkit_cli.goals import GOALS, OTHER_NAMES, menu

if TYPE_CHECKING:
    from peftkit.defaults import Defaults
    from peftkit_cli.survey import Survey

HELD_OUT, FEWEST_TO_HOLD_OUT = 0.05, 100
FEW = 50
CHARACTERS_PER_TOKEN = 4
CHATS = ("causal_lm", "distill", "grpo", "preference", "kto", "reward")
"""Tasks that write conversations with a chat template."""
LEAST_ROOM = 3
"""A base stays in 16 bits where a GPU has so many times the bytes of its weights."""
MANY = 1_000_000
Read = TypeVar("Read")


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
    from peftkit_cli.survey import splits_of, survey

    def rows_of(where: str) -> tuple[str, str, Survey]:
        splits = splits_of(Path(where)) if Path(where).is_dir() else {}
        file, held_out = splits.get("train", where), splits.get("eval", "")
        if splits:
            note(f"Rows to train on: {file}; to evaluate on: {held_out or 'a share of them'}.")
        return file, held_out, survey(file)

    train, held_out, summary = _answer(data, "--data", "Which file has your rows?", rows_of)
    suited = suited_tasks(summary)
    task = _answer(
        task, "--task", menu(suited), lambda name: _checked_task(name, suited, summary), suited[0]
    )
    named = _named_fields(fields, task, summary)
    question = "How much memory has your GPU (12GB)? Or: cpu"
    memory, num_bytes = _answer(memory, "--memory", question, _memory_bytes, "cpu")
    goal = GOALS[task]
    recipe_base = goal.base or _value(recipe_file(goal.recipe), "model")
    usual = recipe_base if num_bytes else goal.small
    model = _answer(model, "--model", "Which base model?", str, usual or None)
    base = size_of(model)
    text = recipe_text(
        task,
        data=train,
        held_out=held_out,
        model=model,
        on_cpu=not num_bytes,
        num_rows=summary.num_rows,
        fields=[field.name for field in summary.fields],
        named=named,
        num_tokens=summary.num_chars // CHARACTERS_PER_TOKEN,
        base=base,
        quantize=None if num_bytes >= 2 * LEAST_ROOM * base.num_parameters > 0 else "nf4",
        chat_template=_template_for(model, summary) if task in CHATS else None,
    )
    write_recipe(out, text)
    typer.echo(out)
    if summary.num_rows < FEW and goal.by_rules:
        note(f"note: {summary.num_rows:,} rows are few: a few hundred are a start.")
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
    task = OTHER_NAMES.get(task.strip().lower(), task.strip())
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


def _named_fields(fields: str | None, task: str, summary: Survey) -> tuple[str, ...]:
    """Return the fields that are read and learnt, where the recipe has to name them; else none.

    A prompt and a completion are named, so that they are a chat on a base with a chat template.
    """
    settings = GOALS[task].fields
    if fields is None and (summary.tasks or not settings):
        return summary.plain if task == "causal_lm" else ()

    def two(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        present = [field.name for field in summary.fields]
        if len(names) != 2 or not set(names) <= set(present) or not settings:
            raise ConfigError(
                f"cannot use --fields {text}.",
                found=f"{summary.where} has the fields: {_listed(summary)}."
                + ("" if settings else f" The task {task} takes no names of fields."),
                fix="Name two of them: the field that is read, a comma, the field that is learnt.",
            )
        return names

    question = (
        f"Fields: {_listed(summary)}\nWhich one is read, and which one is learnt (with a comma)?"
    )
    return _answer(fields, "--fields READ,LEARNT", question, two, ",".join(_longest_two(summary)))


def _longest_two(summary: Survey) -> list[str]:
    """Return the names of the two fields with the longest texts, in their order."""
    by_length = sorted(summary.fields, key=lambda field: -field.mean_chars)[:2]
    return [field.name for field in summary.fields if field in by_length]


def _listed(summary: Survey) -> str:
    return first_few([field.name for field in summary.fields], 8, ", ") or "none"


def _memory_bytes(memory: str) -> tuple[str, int]:
    """Return a GPU's memory as it was written, and in bytes; 0 for a CPU."""
    if memory.strip().lower() == "cpu":
        return memory, 0
    from peftkit.planning.plan import parse_size

    try:
        return memory, parse_size(memory)
    except ConfigError:
        raise ConfigError(
            f"cannot use --memory {memory!r}.",
            found="It is neither a size above zero nor cpu.",
            fix="Write the GPU's memory as 8GB, 24GB or 7.5GiB; without a GPU: cpu.",
        ) from None


def _template_for(model: str, summary: Survey) -> str | None:
    """Return chatml where rows are conversations that the base's own template cannot write."""
    if summary.format not in ("messages", "sharegpt"):
        return None
    from peftkit.base.locate import locate
    from peftkit.base.pretrained import load_tokenizer
    from peftkit.data.chat import own_template
    from peftkit.events import ignore

    try:
        template = own_template(load_tokenizer(locate(model), ignore))
    except PeftkitError:  # it comes later; check names the setting then
        return None
    return None if "tools" in template or (template and not summary.has_tools) else "chatml"


class Size(NamedTuple):
    """Of a base: hidden size, longest row in tokens, parameters; none of them is sure."""

    width: int | None = None
    max_length: int | None = None
    num_parameters: int = 0


def size_of(model: str) -> Size:
    """Return a base's size, as far as it can be read here."""
    from peftkit.base.purpose import CAUSAL_LM
    from peftkit.base.skeleton import on_meta, read_config

    try:
        config = read_config(model, None, CAUSAL_LM)
    except PeftkitError as error:  # it may come later, or from another machine
        note(f"note: {error.asked} {error.fix}")
        return Size()
    text = config.get_text_config()
    width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
    max_length = getattr(text, "max_position_embeddings", None)
    try:
        number = sum(p.numel() for p in on_meta(config, CAUSAL_LM).parameters())
    except Exception:  # no causal model: the recipe's bits stay
        number = 0
    return Size(width, max_length, number)


def recipe_text(
    task: str,
    *,
    data: str,
    model: str,
    on_cpu: bool,
    num_rows: int,
    fields: Sequence[str],
    held_out: str = "",
    named: tuple[str, ...] = (),
    num_tokens: int = 0,
    base: Size = Size(),  # noqa: B008 - it cannot be changed
    quantize: str | None = "nf4",
    chat_template: str | None = None,
) -> str:
    """Return the ready-made recipe of a task for these rows and this base, commented.

    Args:
        fields: Of the rows. named: Those that are read and learnt, if the recipe names them.
        held_out: File to evaluate on; "": a share of the rows, if they are many.
        num_tokens: Of all rows, about.
        quantize: Bits of the base on a GPU; None: 16.
    """
    from peftkit.defaults import BATCHES, CONTRASTIVE_BATCHES, defaults_for

    goal = GOALS[task]
    source = recipe_file(goal.recipe)
    body = source.read_text(encoding="utf-8")
    body = body[re.search(r"(?m)^(?!#)", body).start() :]  # type: ignore[union-attr]
    if goal.section:
        body = re.sub(r"(?m)\Atask:.*\n(?:  .*\n)*", f"task: {goal.section}\n", body)
    body = _set(body, "model", _quoted(model), "hub id, folder, .gguf file or short name")
    if on_cpu:
        body = re.sub(r"(?m)^  (?:quantize|dtype): .*\n", "", body)
    elif quantize is None:
        body = re.sub(r"(?m)^  quantize: .*\n", "", body)
    body = _set(body, "quantize", _value(source, "quantize"), "4 bits; none: 16 bits, if it fits")
    body = _set(body, "train", _quoted(data), "")
    if held_out:
        body = _set(body, "eval", _quoted(held_out), "")
    elif num_rows >= FEWEST_TO_HOLD_OUT:
        body = _set(body, "eval", str(HELD_OUT), "this share of the rows is held out")
    else:
        body = re.sub(r"(?m)^  eval: .*\n", "", body)
    length = min(int(_value(source, "max_length", "1024")), base.max_length or MANY)
    body = _set(body, "max_length", str(length), "tokens; longer rows are truncated")
    file = Path(data)
    name = file.parent.name if file.stem.startswith("train") else ""
    name = re.sub(r"\W+", "-", name or file.stem).strip("-").lower() or "run"
    body = _set(body, "output_dir", f"runs/{name}", "the adapter, its checkpoints and its report")
    body = body.replace(
        "start_from: runs/chat", "type: lora\n  rank: 16\n  alpha: 32\n  targets: all-linear"
    )
    settings = defaults_for(
        num_rows,
        num_tokens if task == "causal_lm" else 0,
        length,
        base.width,
        batches=CONTRASTIVE_BATCHES if task == "embedding" else BATCHES,
    )
    body = _with_defaults(body, task, settings, num_rows)
    if task == "seq2seq" and "document" not in fields:
        body = re.sub(r"(?m)^  (?:source|target|prefix): .*\n", "", body)
    if chat_template is not None:
        comment = "the base's own template cannot write these rows"
        line = f"  chat_template: {chat_template}  # {comment}\n"
        body = re.sub(r"(?m)^(  max_length: .*\n)", lambda match: match[1] + line, body)
    if named:
        body = _with_names(body, task, named)
    head = f"# To {goal.does}. Made by peftkit init from the recipe {goal.recipe}.\n"
    return f"{head}# All fields, with their defaults: peftkit schema\n{body}"


def _with_defaults(body: str, task: str, settings: Defaults, num_rows: int) -> str:
    """Set what follows from rows and base, where the task learns from its rows as they are."""
    from peftkit.defaults import PREFERENCE_RATE

    by_rules, part = GOALS[task].by_rules, PREFERENCE_RATE if GOALS[task].compares else 1
    body = _set(body, "rank", str(settings.rank) if by_rules else None, "how much it can learn")
    if by_rules:
        body = _set(body, "alpha", str(settings.alpha), "stays when the rank changes")
        rate = f"{settings.learning_rate * part:.1e}".replace("e-0", "e-")
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


def _with_names(body: str, task: str, named: Sequence[str]) -> str:
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
        text = match[2] if value is None else value
        return f"{match[1]}{text}" + (f"  # {comment}" if comment else "")

    return re.sub(rf"(?m)^(  {key}: )([^#\n]*?)(?: *#.*)?$", line, body, count=1)


def _quoted(value: str) -> str:
    """Return a text as YAML, in quotes where it would be read as something else without."""
    from peftkit.config.strict_yaml import plain_value

    if re.fullmatch(r"[\w./][\w./-]*", value) and isinstance(plain_value(value), str):
        return value
    return "'" + value.replace("'", "''") + "'"


def _value(recipe: Path, key: str, default: str = "none") -> str:
    match = re.search(rf"(?m)^  {key}: (.+)$", recipe.read_text(encoding="utf-8"))
    return match[1] if match else default


def _answer(
    given: str | None,
    option: str,
    question: str,
    read: Callable[[str], Read],
    default: str | None = None,
) -> Read:
    """Return what an option or an answer on the terminal means; a wrong answer is asked again.

    Raises:
        PeftkitError: The option is wrong, or missing where there is no terminal to ask on.
    """
    if given is not None:
        return read(given)
    if not sys.stdin.isatty():
        raise ConfigError(
            f"peftkit init needs {option}.",
            found="There is no terminal to ask on.",
            fix=f"Add {option}; see peftkit init --help",
        )
    suffix = " " if default is None else ": "
    while True:
        text = typer.prompt(question, default=default, err=True, prompt_suffix=suffix)
        try:
            return read(str(text))
        except PeftkitError as error:
            note(str(error))
