"""Draft a recipe for a data file: the task, the base, and settings that follow from both.

`peftkit init` prompts for each decision; the studio shows the draft in an editor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peftkit.errors import ConfigError, PeftkitError, did_you_mean, first_few
from peftkit_cli.start.recipes import GOALS, OTHER_NAMES, recipe_file

if TYPE_CHECKING:
    from peftkit_cli.start.survey import Survey

WRITERS = (
    "causal_lm",
    "distill",
    "preference",
    "seq2seq",
    "image_text",
    "audio_text",
    "transcription",
)
"""Tasks whose model writes text; drafted recipes sample from it."""
SAMPLED_STEPS = 250
"""Largest number of steps between two samples of a drafted recipe."""
SAMPLED_CHARS = 200
"""Length up to which samples are as long as answers; a token has at least one character."""
HELD_OUT, MIN_HELD_OUT_ROWS, MIN_ROWS_TO_HOLD_OUT = 0.05, 16, 100
CHARACTERS_PER_TOKEN = 4
CHATS = ("causal_lm", "distill", "grpo", "preference", "kto", "reward")
"""Tasks that format conversations with a chat template."""
WHOLE_ROWS = ("causal_lm", "preference", "kto", "reward")
"""Tasks that compute the tokens of a row and no others: `data.max_length` follows from the rows."""
ROOM = 1.5
"""Least ratio of `data.max_length` to the longest row, for rows that are added later."""
WEIGHTS_IN_MEMORY = 3
"""Minimum ratio of GPU memory to 16-bit weights at which a base is not quantised."""
UNLIMITED = 1_000_000
ANCHOR = "1.0"
"""Weight of the anchor. It divides drift by 40 or more at the same score (docs/forgetting.md)."""


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
        found=summary.wrong or f"Their fields: {field_names(summary)}.",
        fix="See docs/data.md for example rows of each task.",
    )


def checked_task(task: str, suited: Sequence[str], summary: Survey) -> str:
    """Return the name of a task, given under this or another common name.

    Raises:
        ConfigError: There is no such task, or it does not accept the rows.
    """
    task = OTHER_NAMES.get(task.strip().lower(), task.strip())
    if task not in GOALS:
        raise ConfigError(
            f"there is no task '{task}'.",
            found=f"The tasks are: {', '.join(GOALS)}. {did_you_mean(task, GOALS)}".rstrip(),
        )
    if task not in suited:
        raise ConfigError(
            f"the task {task} does not accept the rows of {summary.where}.",
            found=f"Their fields: {field_names(summary)}; tasks for them: {', '.join(suited)}.",
            fix="See docs/data.md for example rows of each task.",
        )
    return task


def usual_fields(task: str, summary: Survey) -> tuple[str, ...] | None:
    """Return the input field and the target field that the recipe names; (): it names none.

    None: the fields of the rows are not standard, and the task can be given their names.
    """
    if not summary.tasks and GOALS[task].fields:
        return None
    return summary.plain if task == "causal_lm" else ()


def longest_fields(summary: Survey) -> tuple[str, ...]:
    """Return the two fields with the longest texts, in the order of the rows."""
    longest = sorted(summary.fields, key=lambda field: -field.mean_chars)[:2]
    return tuple(field.name for field in summary.fields if field in longest)


def usual_model(task: str, *, on_gpu: bool) -> str:
    """Return the base that suits a task; "" if a CPU trains none in minutes."""
    goal = GOALS[task]
    return (goal.base or ready_made(goal.recipe)["base"]["model"]) if on_gpu else goal.small


def field_names(summary: Survey) -> str:
    """Return the names of the fields, as one text."""
    return first_few([field.name for field in summary.fields], 8, ", ") or "none"


def memory_bytes(memory: str) -> int:
    """Return the memory of a GPU in bytes; 0 for "cpu".

    Raises:
        ConfigError: It is neither a size nor "cpu".
    """
    if memory.strip().lower() == "cpu":
        return 0
    from peftkit.planning.plan import parse_size

    try:
        return parse_size(memory)
    except ConfigError:
        raise ConfigError(
            f"cannot use --memory {memory!r}.",
            found="It is neither a positive size nor cpu.",
            fix="Write the memory of the GPU as 8GB, 24GB or 7.5GiB; without a GPU: cpu.",
        ) from None


def template_for(model: str, summary: Survey) -> str | None:
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
    """Hidden size, maximum length in tokens and number of parameters of a base, if known.

    Attributes:
        notice: Why they are unknown, or "".
    """

    width: int | None = None
    max_length: int | None = None
    num_parameters: int = 0
    notice: str = ""


def size_of(model: str) -> Size:
    """Return the size of a base, as far as its config is available."""
    from peftkit.base.purpose import CAUSAL_LM
    from peftkit.base.skeleton import on_meta, read_config
    from peftkit.forward.row_lengths import context_length

    try:
        config = read_config(model, None, CAUSAL_LM)
    except PeftkitError as error:  # the base may be downloaded later
        return Size(notice=f"{error.problem} {error.fix}")
    text = config.get_text_config()
    width = getattr(text, "hidden_size", None) or getattr(text, "d_model", None)
    max_length = context_length(config)
    try:
        number = sum(p.numel() for p in on_meta(config, CAUSAL_LM).parameters())
    except Exception:  # not a causal model: keep the quantisation of the recipe
        number = 0
    return Size(width, max_length, number)


def draft(
    summary: Survey,
    task: str,
    model: str,
    num_bytes: int,
    *,
    base: Size | None = None,
    held_out: str = "",
    named: tuple[str, ...] = (),
) -> tuple[str, str]:
    """Draft a recipe: the ready-made one of the task, adapted to surveyed rows and a base.

    Args:
        task: One of `suited_tasks`.
        num_bytes: Memory of the GPU; 0 for a CPU.
        base: Size of the model, by default from its config.
        held_out: File to evaluate on; "" holds out a share of the rows if there are enough.
        named: The input field and the target field, if the recipe names them.

    Returns:
        The recipe as YAML, with comments; and why the size of the base is unknown, or "".
    """
    from peftkit.config.schema import load_text
    from peftkit.defaults import BATCHES, CONTRASTIVE_BATCHES, PREFERENCE_RATE, defaults_for
    from peftkit.planning.plan import MAX_ENCODED
    from peftkit.planning.resolve import tokens_of_first
    from peftkit.recipe import Recipe

    base = base or size_of(model)
    goal, num_rows = GOALS[task], summary.num_rows
    fields = [field.name for field in summary.fields]
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
    elif named or task == "causal_lm":
        names = dict(zip(goal.fields, map(_quoted, named), strict=False))
        recipe["task"] = {"type": task, **names}
        if task == "causal_lm" and (named or fields != ["text"]):
            recipe["task"]["anchor"] = ANCHOR
            comments["anchor"] = "preserves other answers; one to four short rows a step"
    elif task == "seq2seq" and "document" not in fields:
        recipe["task"] = {k: section[k] for k in ("type", "max_target_length")}

    section = recipe["base"]
    section["model"] = _quoted(model)
    if not num_bytes:
        section.pop("dtype", None)
    if not num_bytes or num_bytes >= 2 * WEIGHTS_IN_MEMORY * base.num_parameters > 0:
        section.pop("quantize", None)

    section = recipe["data"]
    length = min(int(section.get("max_length", 1024)), base.max_length or UNLIMITED)
    settings = defaults_for(
        num_rows,
        summary.num_chars // CHARACTERS_PER_TOKEN if task == "causal_lm" else 0,
        length,
        base.width,
        batches=CONTRASTIVE_BATCHES if task == "embedding" else BATCHES,
    )
    section["train"] = _quoted(summary.where)
    share = 0.0  # of the rows that is held out
    if not held_out and num_rows < MIN_ROWS_TO_HOLD_OUT:
        section.pop("eval", None)
        for setting in ("eval_before", "eval_generate", "sample_every"):
            recipe["train"].pop(setting, None)
    elif "eval" in section:
        share = 0.0 if held_out else max(HELD_OUT, round(MIN_HELD_OUT_ROWS / num_rows, 2))
        section["eval"] = _quoted(held_out) if held_out else str(share)
        comments |= {} if held_out else {"eval": "share of the rows that is held out"}
    if "max_length" in section:
        section["max_length"] = str(length)
        if task in CHATS and (template := template_for(model, summary)) is not None:
            section["chat_template"] = template
            comments["chat_template"] = "the template of the base cannot format these rows"
    if task == "causal_lm":
        section["packing"] = str(settings.packing).lower()
        comments["packing"] = "true joins short rows; false gives more steps with few rows"

    section = recipe["method"]
    if "start_from" in section:
        section = recipe["method"] = {"type": "lora", "rank": "16", "alpha": "32"}
        section["targets"] = "all-linear"
    train = recipe["train"]
    file = Path(summary.where)
    name = (file.parent.name if file.stem.startswith("train") else "") or file.stem
    name = re.sub(r"\W+", "-", name).strip("-").lower() or "run"
    train["output_dir"] = f"runs/{name}"
    if task == "causal_lm" and "eval" in recipe["data"]:
        train["drift"] = "{on: self}"
        comments["drift"] = "measures how much the answers to unrelated prompts change"
    if goal.by_rules:
        section |= {"rank": str(settings.rank), "alpha": str(settings.alpha)}
        rate = settings.learning_rate * (PREFERENCE_RATE if goal.compares else 1)
        train["learning_rate"] = f"{rate:.1e}".replace("e-0", "e-")
        comments["alpha"] = "keep it when you change the rank"
        comments["learning_rate"] = "tune this first: try a third, then three times"
    num_steps = round(settings.num_steps * (1 - share))
    if task != "grpo":  # its recipe sets many completions per step
        train.pop("gradient_accumulation", None)
        train |= {"batch_size": str(settings.batch_size), "epochs": str(settings.epochs)}
        comments["batch_size"] = f"{'packed ' * settings.packing}rows of an optimizer step"
        comments["epochs"] = (
            f"passes over the {round(num_rows * (1 - share)):,} rows: about {num_steps:,} steps"
        )
        if task in WRITERS and "eval" in recipe["data"] and fields != ["text"]:
            every = min(math.ceil(num_steps / 2), SAMPLED_STEPS)
            train |= {"eval_every": str(every), "sample_every": str(every)}
            chars = {field.name: field.mean_chars for field in summary.fields}
            if named and (length := math.ceil(chars.get(named[-1], UNLIMITED))) <= SAMPLED_CHARS:
                train["sample_tokens"] = str(max(length, 16))  # complete, to be scored
            comments["sample_every"] = "answers to three held-out rows, also before training"
    if task in WHOLE_ROWS and not settings.packing and not base.notice:
        measured = tokens_of_first(load_text(Recipe, _as_yaml(recipe, {}), "draft"), MAX_ENCODED)
        if 0 < (longest := max(measured, default=0)) < length:
            room = min(length, 2 ** math.ceil(math.log2(ROOM * longest)))
            recipe["data"]["max_length"] = str(room)
            comments["max_length"] = f"tokens; the longest row has {longest:,}; longer ones are cut"
    head = f"# To {goal.does}. From the recipe {goal.recipe}, by peftkit init.\n"
    text = f"{head}# All fields, with their defaults: peftkit schema\n{_as_yaml(recipe, comments)}"
    return text, base.notice


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
