"""`peftkit import-recipe`: convert axolotl's or LLaMA-Factory's YAML to a recipe."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any

import typer

from peftkit.errors import ConfigError, OutputError
from peftkit_cli.about import write_recipe
from peftkit_cli.arguments import note

Settings = dict[str, Any]
TABLE = Path(__file__).with_suffix(".yaml")
"""Maps their keys to ours."""
DATA_KEYS = ("datasets", "test_datasets", "dataset", "eval_dataset", "dataset_dir", "stage")


def import_recipe(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML of axolotl or LLaMA-Factory.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Recipe to write.")],
) -> None:
    """Convert a YAML file of axolotl or LLaMA-Factory. Prints the recipe's path.

    Keys without a counterpart are listed with their values.
    """
    if out.exists():
        raise OutputError(f"'{out}' exists already.", fix="Choose another name with --out.")
    from peftkit.config.schema import dump_yaml, from_dict
    from peftkit.recipe import Recipe

    values, lost = converted(read(file), file.parent)
    recipe = from_dict(Recipe, values, str(file))
    head = [f"# Made from {file.name} by peftkit import-recipe."]
    head += [f"# No counterpart: {key}: {json.dumps(value)}" for key, value in lost.items()]
    write_recipe(out, "\n".join([*head, dump_yaml(recipe)]))
    typer.echo(out)
    for key, value in lost.items():
        note(f"no counterpart: {key}: {json.dumps(value)}")
    note(f"Next: peftkit check {out}")


def read(file: Path) -> Settings:
    """Return a YAML file's settings.

    Raises:
        ConfigError: It cannot be read, or is no mapping.
    """
    import yaml

    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read '{file}'.", found=str(error)) from None
    if not isinstance(settings, dict):
        raise ConfigError(f"'{file}' holds no settings.", found=f"It holds {settings!r:.60}.")
    return settings


def converted(theirs: Settings, folder: Path) -> tuple[Settings, Settings]:
    """Return a recipe's values by section, and the settings without a counterpart.

    Args:
        folder: Contains LLaMA-Factory's dataset_dir.

    Raises:
        ConfigError: The settings are of neither program.
    """
    table = read(TABLE)
    if "base_model" in theirs:
        program, data = table["axolotl"], axolotl_data
    elif "model_name_or_path" in theirs:
        program, data = table["llama_factory"], llama_factory_data
        rank = theirs.get("lora_rank") or program["defaults"]["lora_rank"]
        theirs.setdefault("lora_alpha", 2 * int(rank))
    else:
        raise ConfigError(
            "this is neither axolotl's YAML nor LLaMA-Factory's.",
            found="It has neither base_model nor model_name_or_path.",
        )
    ours: Settings = {"method": {"type": "lora"}}
    lost = data(theirs, folder, ours)
    left_out = {*lost, *DATA_KEYS, *(["pref_loss"] if theirs.get("stage") == "kto" else [])}
    rules = table["both"] | program["keys"]
    for key, value in (program["defaults"] | theirs).items():
        if key in left_out or value is None:
            continue
        try:
            translation = translated(value, **rules[key])
        except (KeyError, TypeError, ValueError):
            lost[key] = value
            continue
        if translation is not None and (place := rules[key].get("to")):
            put(ours, place, translation)
    if "loss" in ours.get("task", {}):
        ours["task"]["type"] = "preference"
        ours["data"].pop("packing", None)  # pairs are not packed
    elif task := ours.pop("task", None):
        lost |= {f"task.{key}": value for key, value in task.items() if key != "type"}
        ours |= {"task": {"type": task["type"]}} if "type" in task else {}
    if start := ours["method"].get("start_from"):
        ours["method"] = {"start_from": start}  # the rest is the adapter's own
    return ours, lost


def translated(value: Any, **rule: Any) -> Any:
    """Return our value for one of theirs by its line of the table; None: nothing to set.

    Raises:
        KeyError, TypeError, ValueError: It has no counterpart.
    """
    values, kind = rule.get("values", {}), rule.get("as")
    if isinstance(value, Hashable) and value in values:
        return values[value]
    if kind == "number":
        return float(value)
    if kind == "names":
        return names(value)
    if values and kind is None:
        raise KeyError(value)
    return kind or value


def names(value: Any) -> Any:
    """Return a list of names; one text may hold several."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def axolotl_data(theirs: Settings, folder: Path, ours: Settings) -> Settings:
    """Put axolotl's data sets into `ours`; return the settings without a counterpart."""
    lost: Settings = {}
    for key, place in (("datasets", "train"), ("test_datasets", "eval")):
        paths = []
        for n, one in enumerate(theirs.get(key) or ()):
            more = dict(one)
            files = more.pop("data_files", None)
            path, split = files or more.pop("path", None), more.pop("split", None)
            more.pop("path", None)
            more.pop("ds_type", None)
            if str(more.get("type")).split(".")[0] in AXOLOTL_TYPES:
                more.pop("type")
            several = path if isinstance(path, list) else [path]
            paths += [f"{p}:{split}" if split and not files else str(p) for p in several]
            lost |= {f"{key}[{n}].{name}": value for name, value in more.items()}
        put_files(ours, place, paths, lost, key)
    return lost


AXOLOTL_TYPES = ("alpaca", "chat_template", "sharegpt", "completion", "input_output", "chatml")
"""Formats that are recognised by the fields of a row."""


def llama_factory_data(theirs: Settings, folder: Path, ours: Settings) -> Settings:
    """Put LLaMA-Factory's data sets into `ours`; return the settings without a counterpart."""
    lost: Settings = {}
    place = folder / str(theirs.get("dataset_dir", "data"))
    try:
        data_sets = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data_sets = {}
    for key, ours_key in (("dataset", "train"), ("eval_dataset", "eval")):
        paths = []
        for name in names(theirs.get(key) or ""):
            about = data_sets.get(name, {})
            if "file_name" in about:
                paths.append(str(place / about["file_name"]))
            elif name:
                paths.append(about.get("hf_hub_url", name))
            more = {k: about[k] for k in ("columns", "tags") if k in about}
            lost |= {f"dataset_info.{name}.{k}": value for k, value in more.items()}
        put_files(ours, ours_key, paths, lost, key)
    stage = theirs.get("stage", "sft")
    if stage == "rm":
        put(ours, "task.type", "reward")
    elif stage in ("dpo", "kto"):
        put(ours, "task.loss", stage)
    elif stage not in ("sft", "pt"):
        lost["stage"] = stage
    return lost


def put_files(ours: Settings, place: str, paths: list[str], lost: Settings, key: str) -> None:
    """Put files into data.train, or one into data.eval."""
    if place == "eval" and len(paths) > 1:
        lost[key] = paths
    elif paths:
        several = [{"path": path} for path in paths]
        put(ours, f"data.{place}", paths[0] if len(paths) == 1 else several)


def put(ours: Settings, place: str, value: Any) -> None:
    """Set a value by its dotted name."""
    *sections, name = place.split(".")
    for section in sections:
        ours = ours.setdefault(section, {})
    ours[name] = value
