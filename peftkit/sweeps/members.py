"""The members of a sweep: recipes over one base that differ in what does not change the base."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peftkit.config.strict_yaml import SourceLocation, parse, written_values
from peftkit.errors import ConfigError
from peftkit.run.config import Recipe, load
from peftkit.run.rules import why_alone
from peftkit.train.checkpoints.identity import flat

SAME = (
    *("data.max_length", "data.packing", "data.format", "data.reasoning"),
    *("data.chat_template", "data.chat_template_kwargs"),
    "train.gradient_checkpointing",
)
"""What decides how rows become batches, and what is kept of them."""
MAX_MEMBERS = 256
FIX_OVER = "Write KEY=VALUE,VALUE: method.rank=8,16,64"


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a sweep.

    Attributes:
        name: Of its folder. settings: What it was asked to have of its own, by dotted key.
    """

    name: str
    recipe: Recipe
    settings: Mapping[str, Any]


def folder_of(path: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Return where a sweep goes that is not told: train.output_dir of its recipe, if set."""
    train = load(path, overrides).train
    return train.output_dir if "output_dir" in train.model_fields_set else Path("runs/sweep")


def grid(
    path: str | Path, over: Sequence[str], overrides: Sequence[str] = (), *, out: Path
) -> list[Member]:
    """Return a member for each combination of values.

    Args:
        path: The recipe. overrides: "section.key=value", of all members.
        over: "section.key=value,value,..." each.
        out: Each member trains into a folder of its own below this one.

    Raises:
        ConfigError: As `load`; or a key has no values, or stands twice.
    """
    axes = [_axis(text) for text in over]
    keys = [key for key, _ in axes]
    if not axes or len(set(keys)) < len(keys):
        raise ConfigError(
            "a sweep varies at least one setting, each once",
            found=f"--over: {', '.join(keys) or 'nothing'}",
            fix="peftkit sweep RECIPE --over method.rank=8,16 --over train.learning_rate=1e-4,3e-4",
        )
    choices = list(itertools.product(*(values for _, values in axes)))
    picked = {
        _name(dict(zip(keys, values, strict=True))): dict(zip(keys, values, strict=True))
        for values in choices
    }
    if len(picked) < len(choices):
        raise ConfigError("two members of the sweep are the same", found="; ".join(over))
    return _members(path, picked, overrides, out)


def pick(
    path: str | Path, file: str | Path, overrides: Sequence[str] = (), *, out: Path
) -> list[Member]:
    """Return the members that a YAML file names: {small: {method.rank: 8}, ...}.

    Raises:
        ConfigError: As `load`; or the file is not like that.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    parsed = parse(text, lambda line: SourceLocation(str(file), line))
    data = parsed.data
    if (
        parsed.problems
        or not isinstance(data, dict)
        or not data
        or not all(isinstance(settings, dict) for settings in data.values())
    ):
        raise ConfigError(
            f"{file} does not name the members of a sweep",
            fix="Write a line for each: NAME: {method.rank: 8, train.learning_rate: 1e-4}",
        )
    picked = {
        str(name): {
            str(key): value if isinstance(value, str) else json.dumps(value)
            for key, value in settings.items()
        }
        for name, settings in data.items()
    }
    return _members(path, picked, overrides, out)


def check_members(members: Sequence[Member]) -> None:
    """Make sure that the members can be trained together.

    Raises:
        ConfigError: Names what differs, or is not of this kind, and in which members.
    """
    if len(members) < 2 or len(members) > MAX_MEMBERS:
        raise ConfigError(
            f"a sweep has from 2 to {MAX_MEMBERS} members", found=f"There are {len(members)}."
        )
    settings = [flat(member.recipe.model_dump(mode="json")) for member in members]
    for key in dict.fromkeys(key for own in settings for key in own):
        if key.startswith(("base.", "task.")) or key in SAME:
            _same(members, key, [own.get(key) for own in settings])
    for member in members:
        if (why := why_alone(member.recipe)) is not None:
            raise ConfigError(
                f"{member.name} cannot be trained together with others: {why[0]}",
                found=why[1],
                fix="Train it with peftkit train.",
            )


def _same(members: Sequence[Member], key: str, values: Sequence[Any]) -> None:
    for member, value in zip(members, values, strict=True):
        if value != values[0]:
            raise ConfigError(
                f"members of a sweep share base, task and kind of rows; {key} differs",
                found=f"{members[0].name}: {values[0]}\n{member.name}: {value}",
                fix="Sweep over these one after the other.",
            )


def _members(
    path: str | Path, picked: Mapping[str, Mapping[str, str]], overrides: Sequence[str], out: Path
) -> list[Member]:
    members = []
    for name, settings in picked.items():
        if not re.fullmatch(r"\w[\w.=+-]*", name):
            raise ConfigError(f"'{name}' cannot be the name of a member, and of its folder")
        own = [f"{key}={value}" for key, value in settings.items()]
        folder = json.dumps(str(out / name))
        recipe = load(path, [*overrides, *own, f"train.output_dir={folder}"])
        known = flat(recipe.model_dump(mode="json"))
        members.append(Member(name, recipe, {k: known.get(k, settings[k]) for k in settings}))
    return members


def _axis(text: str) -> tuple[str, list[str]]:
    """Return a setting and its values, each as it is written."""
    key, _, values = text.partition("=")
    found = written_values(values)
    if not key or not found:
        raise ConfigError(f"--over {text}: no values to try", fix=FIX_OVER)
    return key, found


def _name(settings: Mapping[str, str]) -> str:
    """Return "rank=8-learning_rate=1e-4", fit for the name of a folder."""
    pairs = (f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
    return re.sub(r"[^\w.=+-]+", "_", "-".join(pairs)).strip("_")
