"""Readable validation errors of recipes: the key, pydantic's message, and the value.

The `loc` of a pydantic error also contains tags of unions and branches: the key consists of the
parts that exist in the data.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from peftkit.config.lazy import LazyTable, options_of
from peftkit.config.strict_yaml import Key, Problem, SourceLocation
from peftkit.errors import did_you_mean
from peftkit.files.strict_json import JsonMap

_WORDS = {
    r"^Input tag .* expected tags:": "should be one of",
    r"^Input (should|is)": r"\1",
    r"an instance of Path": "a path",
    r"a valid dictionary( or instance of \w+)?": "a section (keys with values)",
    r"a valid tuple": "a list",
    r"a valid string": "text",
    r"a valid boolean": "true or false",
    r"^should be (.*) or should be": r"should be \1 or",
}
"""Patterns in pydantic's messages, and their replacements."""


_SYNONYMS = {
    "checkpoint_every": "save_every",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "steps_per_eval": "eval_every",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "iters": "max_steps",
    "warmup_steps": "warmup_ratio",
    "lr_scheduler_type": "schedule",
    "optim": "optimizer",
    "bf16": "base.dtype",
    "fp16": "base.dtype",
    "torch_dtype": "base.dtype",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_seq_length": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "lora_target": "targets",
    "load_in_4bit": "quantize",
    "4bit": "nf4",
    "8bit": "int8",
    "qlora": "lora",
    "sft": "causal_lm",
    "dpo": "preference",
}
"""Settings of other programs, and ours; with a section where several sections have the name."""


_REMOVED = {
    "context_parallel": "No setting splits a row over processes; for long rows set "
    "gradient_checkpointing: true, shard: base or offload, or base.quantize: nf4",
}
"""Removed keys, and a replacement for each."""


def problems_of(
    root: type[BaseModel],
    error: ValidationError,
    data: object,
    locations: Mapping[Key, SourceLocation],
) -> list[Problem]:
    """Translate pydantic's errors: one problem per key, with the location in the source."""
    groups: dict[Key, list[JsonMap]] = {}
    for detail in error.errors(include_url=False):
        groups.setdefault(_key(detail, data), []).append(detail)
    problems = []
    for key, group in groups.items():
        if any(other[: len(key)] == key != other for other in groups):
            continue  # keep the branch of a union that matched deepest
        location = next(locations[key[:n]] for n in range(len(key), -1, -1) if key[:n] in locations)
        problems.append(Problem(location, key, _message(root, group)))
    return problems


def sections_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the config classes that a field accepts; classes of a LazyTable are imported."""
    tables = [table for table in field.metadata if isinstance(table, LazyTable)]
    options = [kind for table in tables for kind in table.values()]
    options = options or [*options_of(field.annotation)]
    return [kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _key(detail: JsonMap, data: object) -> Key:
    key: Key = ()
    for part in detail["loc"]:
        inside: Any = data.__dict__ if isinstance(data, BaseModel) else data
        in_list = isinstance(inside, list | tuple) and isinstance(part, int)
        if in_list or (isinstance(inside, Mapping) and part in inside):
            key, data = (*key, part), inside[part]
    if detail["type"] == "missing":
        return (*key, detail["loc"][-1])
    return (*key, "type") if detail["type"].startswith("union_tag") else key


def _message(root: type[BaseModel], group: list[JsonMap]) -> str:
    """Merge the errors of one key (one per branch of a union) into one message."""
    first = group[0]
    kind, value = first["type"], first["input"]
    if kind == "extra_forbidden":
        return _unknown(root, first["loc"])
    if kind in {"missing", "union_tag_not_found"}:
        return "is required and missing"
    if kind in {"value_error", "assertion_error"}:
        error = first["ctx"]["error"]
        return " ".join(str(error).split())
    text = " or ".join(dict.fromkeys(detail["msg"] for detail in group)).replace(" or Input", " or")
    for pattern, words in _WORDS.items():
        text = re.sub(pattern, words, text)
    if kind == "union_tag_invalid":
        value = value.get("type")
    if kind.startswith(("greater_than", "less_than")) and _may_be_null(root, first["loc"]):
        text += ", or null"
    near = _near(value, re.findall("'(.*?)'", text))
    return f"{text}; found {show(value)}. {near}".rstrip(". ")


def _unknown(root: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Suggest a similar field of this section, then of other sections."""
    word = str(loc[-1])
    if word in _REMOVED:
        return f"was removed. {_REMOVED[word]}"
    fields = _fields(root, loc[:-1])
    section, _, meant = _SYNONYMS.get(word, word).rpartition(".")
    for name in root.model_fields:
        if meant in _fields(root, (name,)) and name != loc[0] and section in ("", name):
            fields = {f"{name}.{meant}": meant, **fields}
    hint = _near(word, fields) or f"Keys of this section: {', '.join(fields)}"
    return f"unknown key. {hint}"


def _may_be_null(root: type[BaseModel], loc: tuple[int | str, ...]) -> bool:
    """Return whether the field at `loc` accepts null; `loc` may end in the branch of a union."""
    for number in range(len(loc) - 1, -1, -1):
        for section in _sections(root, loc[:number]):
            if (field := section.model_fields.get(str(loc[number]))) is not None:
                return types.NoneType in options_of(field.annotation)
    return False


def _fields(root: type[BaseModel], loc: tuple[int | str, ...]) -> dict[str, str]:
    """Return the names of the fields of the section at `loc`."""
    return {name: name for section in _sections(root, loc) for name in section.model_fields}


def _sections(root: type[BaseModel], loc: tuple[int | str, ...]) -> list[type[BaseModel]]:
    """Return the config classes at `loc`; the tag of a section may follow its key."""
    sections = [root]
    for part in loc:
        tagged = [s for s in sections if part in _tags(s)]
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        sections = tagged or [inner for field in fields for inner in sections_of(field)]
    return sections


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    """Return the values of `type` that select this config class."""
    field = section.model_fields.get("type")
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()


def _near(word: object, options: Iterable[str]) -> str:
    """Return `did_you_mean`, also for synonyms, initials (`lr`) and names within the word."""
    names = list(options)
    if not isinstance(word, str) or not word:
        return ""
    initials = {"".join(part[:1] for part in name.split("_")): name for name in reversed(names)}
    within = [name for name in names if len(name) > 3 and name in word.lower()]
    meant = _SYNONYMS.get(word.lower(), word)
    others = [name for name in names if meant in (name.partition(".")[2], name)]
    guesses = [*others, *([initials[word]] if word in initials else []), *within]
    if meant != word and others:
        return f"Did you mean '{others[0]}'?"
    return did_you_mean(word, names) or (f"Did you mean '{guesses[0]}'?" if guesses else "")


def show(value: object) -> str:
    """Format a value briefly, as a recipe would contain it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return "a section (keys with values)"
    if isinstance(value, tuple | list):
        return "a list" if value else "an empty list"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    short = text if len(text) <= 60 else text[:57] + "..."
    return f"the text '{short}'" if isinstance(value, str) else short
