"""`peftkit init`: write a recipe from the answers to a few questions."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from peftkit.errors import ConfigError, OutputError, PeftkitError, did_you_mean, first_few
from peftkit_cli.about import recipe_file, write_recipe
from peftkit_cli.arguments import note
from peftkit_cli.goals import GOALS, OTHER_NAMES, menu

if TYPE_CHECKING:
    from peftkit_cli.survey import Survey

HELD_OUT, MIN_HELD_OUT_ROWS, MIN_ROWS_TO_HOLD_OUT = 0.05, 16, 100
FEW = 50
CHARACTERS_PER_TOKEN = 4
CHATS = ("causal_lm", "distill", "grpo", "preference", "kto", "reward")
"""Tasks that format conversations with a chat template."""
WEIGHTS_IN_MEMORY = 3
"""Minimum ratio of GPU memory to 16-bit weights at which a base is not quantised."""
UNLIMITED = 1_000_000
Parsed = TypeVar("Parsed")


def init(
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Training data: a file, folder or data set.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help=f"Task to train: {', '.join(GOALS)}.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Base model: hub id, folder, .gguf or short name."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="GPU memory, such as 12GB; or cpu.")
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT,TARGET",
            help="Names of the input and the target field, if they are not standard.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Recipe to write.")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a recipe for your data, from four questions.

    Options answer the questions in advance. Prints the path of the recipe.
    """
    if out.exists():
        raise OutputError(f"'{out}' exists already.", fix="Choose another name with --out.")
    from peftkit_cli.survey import only_data_file, splits_of, survey

    def read_data(where: str) -> tuple[str, str, Survey]:
        path = Path(where)
        splits = splits_of(path) if path.is_dir() else {}
        if path.is_file() and splits_of(path.parent).get("train") == str(path):
            splits = splits_of(path.parent)
        file, held_out = splits.get("train", where), splits.get("eval", "")
        if path.is_dir() or held_out:
            note(f"Training data: {file}; evaluation data: {held_out or 'a share of it'}.")
        return file, held_out, survey(file)

    train, held_out, summary = _answer(
        data, "--data", "Which file has your rows?", read_data, only_data_file(Path())
    )
    suited = suited_tasks(summary)
    task = _answer(
        task, "--task", menu(suited), lambda name: _checked_task(name, suited, summary), suited[0]
    )
    named = _named_fields(fields, task, summary)
    question = "How much memory does your GPU have (such as 12GB)? Without a GPU: cpu"
    memory, num_bytes = _answer(memory, "--memory", question, _memory_bytes, "cpu")
    goal = GOALS[task]
    on_gpu = goal.base or ready_made(goal.recipe)["base"]["model"]
    default = on_gpu if num_bytes else goal.small
    model = _answer(model, "--model", "Which base model?", str, default or None)
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
        quantize=None if num_bytes >= 2 * WEIGHTS_IN_MEMORY * base.num_parameters > 0 else "nf4",
        chat_template=_template_for(model, summary) if task in CHATS else None,
    )
    write_recipe(out, text)
    typer.echo(out)
    if summary.num_rows < FEW and goal.by_rules:
        note(f"note: {summary.num_rows:,} rows are few; a few hundred are a good start.")
    memory_option = f" --memory {shlex.quote(memory)}" if num_bytes else ""
    quoted = shlex.quote(str(out))
    commands = (f"check {quoted}", f"plan {quoted}{memory_option}", f"train {quoted}")
    note("Next: " + "\n      ".join(f"peftkit {command}" for command in commands))


def suited_tasks(summary: Survey) -> list[str]:
    """Return the tasks that accept the rows; for unknown fields, the tasks that can name fields.

    Raises:
        ConfigError: There is none.
    """
    tasks = ["kto" if "kto" in name else name for name in summary.tasks]
    tasks = [name for name in tasks if name in GOALS]
    if not tasks and not summary.wrong and len(summary.fields) > 1:
        tasks = [name for name, goal in GOALS.items() if goal.fields]
    if tasks:
        return tasks
    raise ConfigError(
        f"no task accepts the rows of {summary.where}.",
        found=summary.wrong or f"Their fields: {_field_names(summary)}.",
        fix="See docs/data.md for example rows of each task.",
    )


def _checked_task(task: str, suited: Sequence[str], summary: Survey) -> str:
    task = OTHER_NAMES.get(task.strip().lower(), task.strip())
    if task not in GOALS:
        raise ConfigError(
            f"there is no task '{task}'.",
            found=f"The tasks are: {', '.join(GOALS)}. {did_you_mean(task, GOALS)}".rstrip(),
        )
    if task not in suited:
        raise ConfigError(
            f"the task {task} does not accept the rows of {summary.where}.",
            found=f"Their fields: {_field_names(summary)}; tasks for them: {', '.join(suited)}.",
            fix="See docs/data.md for example rows of each task.",
        )
    return task


def _named_fields(fields: str | None, task: str, summary: Survey) -> tuple[str, ...]:
    """Return the input field and the target field if the recipe must name them; else ().

    If the recipe names a prompt and a completion, they become a chat.
    """
    settings = GOALS[task].fields
    if fields is None and (summary.tasks or not settings):
        return summary.plain if task == "causal_lm" else ()

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        existing = {field.name for field in summary.fields}
        if len(names) != 2 or not existing.issuperset(names) or not settings:
            raise ConfigError(
                f"cannot use --fields {text}.",
                found=f"{summary.where} has the fields: {_field_names(summary)}."
                + ("" if settings else f" The task {task} does not accept field names."),
                fix="Name two of them, with a comma: the input field and the target field.",
            )
        return names

    question = f"Fields: {_field_names(summary)}\nWhich are input and target (with a comma)?"
    longest = sorted(summary.fields, key=lambda field: -field.mean_chars)[:2]
    default = ",".join(field.name for field in summary.fields if field in longest)
    return _answer(fields, "--fields INPUT,TARGET", question, parse, default)


def _field_names(summary: Survey) -> str:
    return first_few([field.name for field in summary.fields], 8, ", ") or "none"


def _memory_bytes(memory: str) -> tuple[str, int]:
    """Return the memory of a GPU as given, and in bytes; 0 for a CPU."""
    if memory.strip().lower() == "cpu":
        return memory, 0
    from peftkit.planning.plan import parse_size

    try:
        return memory, parse_size(memory)
    except ConfigError:
        raise ConfigError(
            f"cannot use --memory {memory!r}.",
            found="It is neither a positive size nor cpu.",
            fix="Write the memory of the GPU as 8GB, 24GB or 7.5GiB; without a GPU: cpu.",
        ) from None


def _template_for(model: str, summary: Survey) -> str | None:
    """Return "chatml" if the rows are conversations that the base's template cannot format."""
    if summary.format not in ("messages", "sharegpt"):
        return None
    from peftkit.base.locate import locate
    from peftkit.base.pretrained import load_tokenizer
    from peftkit.data.chat_template import own_template
    from peftkit.events import ignore

    try:
        template = own_template(load_tokenizer(locate(model), ignore))
    except PeftkitError:  # the base may be downloaded later; `peftkit check` then reports it
        return None
    return None if "tools" in template or (template and not summary.has_tools) else "chatml"


class Size(NamedTuple):
    """Hidden size, maximum length in tokens and number of parameters of a base, if known."""

    width: int | None = None
    max_length: int | None = None
    num_parameters: int = 0


def size_of(model: str) -> Size:
    """Return the size of a base, as far as its config is available."""
    from peftkit.base.purpose import CAUSAL_LM
    from peftkit.base.skeleton import on_meta, read_config

    try:
        config = read_config(model, None, CAUSAL_LM)
    except PeftkitError as error:  # the base may be downloaded later
        note(f"note: {error.problem} {error.fix}")
        return Size()
    text = config.get_text_config()
    width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
    max_length = getattr(text, "max_position_embeddings", None)
    try:
        number = sum(p.numel() for p in on_meta(config, CAUSAL_LM).parameters())
    except Exception:  # not a causal model: keep the quantisation of the recipe
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
    base: Size = Size(),  # noqa: B008 - immutable
    quantize: str | None = "nf4",
    chat_template: str | None = None,
) -> str:
    """Return the ready-made recipe of a task, adapted to rows and base, with comments.

    Args:
        fields: Fields of the rows.
        held_out: File to evaluate on; "" holds out a share of the rows if there are enough.
        named: The input field and the target field, if the recipe names them.
        num_tokens: Approximate number of tokens of all rows.
        quantize: Quantisation of the base on a GPU; None for 16 bits.
    """
    from peftkit.defaults import BATCHES, CONTRASTIVE_BATCHES, PREFERENCE_RATE, defaults_for

    goal = GOALS[task]
    recipe = ready_made(goal.recipe)
    comments = {
        "model": "hub id, folder, .gguf file or short name",
        "quantize": "4 bits; none for 16 bits, if they fit",
        "max_length": "tokens; longer rows are truncated",
        "output_dir": "the adapter, its checkpoints and its report",
        "rank": "capacity of the adapter",
    }

    section = recipe["task"]
    if goal.section:
        recipe["task"] = {"": goal.section}
    elif named:
        names = zip(goal.fields, map(_quoted, named), strict=True)
        recipe["task"] = {"type": task, **dict(names)}
    elif task == "seq2seq" and "document" not in fields:
        recipe["task"] = {k: section[k] for k in ("type", "max_target_length")}

    section = recipe["base"]
    section["model"] = _quoted(model)
    if on_cpu:
        section.pop("dtype", None)
    if on_cpu or quantize is None:
        section.pop("quantize", None)

    section = recipe["data"]
    length = min(int(section.get("max_length", 1024)), base.max_length or UNLIMITED)
    settings = defaults_for(
        num_rows,
        num_tokens if task == "causal_lm" else 0,
        length,
        base.width,
        batches=CONTRASTIVE_BATCHES if task == "embedding" else BATCHES,
    )
    section["train"] = _quoted(data)
    if not held_out and num_rows < MIN_ROWS_TO_HOLD_OUT:
        section.pop("eval", None)
    elif "eval" in section:
        share = max(HELD_OUT, round(MIN_HELD_OUT_ROWS / num_rows, 2))
        section["eval"] = _quoted(held_out) if held_out else str(share)
        comments |= {} if held_out else {"eval": "share of the rows that is held out"}
    if "max_length" in section:
        section["max_length"] = str(length)
        if chat_template is not None:
            section["chat_template"] = chat_template
            comments["chat_template"] = "the template of the base cannot format these rows"
    if task == "causal_lm":
        section["packing"] = str(settings.packing).lower()
        comments["packing"] = "true joins short rows; false gives more steps with few rows"

    section = recipe["method"]
    if "start_from" in section:
        section = recipe["method"] = {"type": "lora", "rank": "16", "alpha": "32"}
        section["targets"] = "all-linear"
    train = recipe["train"]
    file = Path(data)
    name = (file.parent.name if file.stem.startswith("train") else "") or file.stem
    name = re.sub(r"\W+", "-", name).strip("-").lower() or "run"
    train["output_dir"] = f"runs/{name}"
    if goal.by_rules:
        section |= {"rank": str(settings.rank), "alpha": str(settings.alpha)}
        rate = settings.learning_rate * (PREFERENCE_RATE if goal.compares else 1)
        train["learning_rate"] = f"{rate:.1e}".replace("e-0", "e-")
        comments["alpha"] = "keep it when you change the rank"
        comments["learning_rate"] = "tune this first: try a third, then three times"
    if task != "grpo":  # its recipe sets many completions per step
        train.pop("gradient_accumulation", None)
        train |= {"batch_size": str(settings.batch_size), "epochs": str(settings.epochs)}
        comments["batch_size"] = f"{'packed ' * settings.packing}rows of an optimizer step"
        comments["epochs"] = (
            f"passes over the {num_rows:,} rows: about {settings.num_steps:,} steps"
        )
    head = f"# To {goal.does}. From the recipe {goal.recipe}, by peftkit init.\n"
    return f"{head}# All fields, with their defaults: peftkit schema\n{_as_yaml(recipe, comments)}"


def ready_made(name: str) -> dict[str, dict[str, str]]:
    """Return the sections of a ready-made recipe, with values as YAML text.

    The value of a section without fields has the key "".
    """
    recipe: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for line in recipe_file(name).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if line.startswith("  "):
            fields[key.strip()] = value.strip()
        elif not line.startswith("#"):
            fields = recipe[key] = {"": value.strip()} if value else {}
    return recipe


def _as_yaml(recipe: Mapping[str, Mapping[str, str]], comments: Mapping[str, str]) -> str:
    lines = []
    for section, fields in recipe.items():
        lines.append(f"{section}: {fields.get('', '')}".rstrip())
        for key, value in fields.items():
            comment = f"  # {comments[key]}" if key in comments else ""
            lines += [f"  {key}: {value}{comment}"] if key else []
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """Return a string as YAML, in quotes if YAML would read it as something else."""
    from peftkit.config.strict_yaml import plain_value

    if re.fullmatch(r"[\w./][\w./-]*", value) and isinstance(plain_value(value), str):
        return value
    return "'" + value.replace("'", "''") + "'"


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
