"""`peftkit import-recipe`: convert YAML of axolotl, LLaMA-Factory or mlx-lm to a recipe."""

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
"""Maps the keys of other programs to ours."""
TABLES = frozenset(("embed_tokens", "lm_head"))
DATA_KEYS = ("datasets", "test_datasets", "dataset", "eval_dataset", "dataset_dir", "stage", "data")


def import_recipe(file: Path, out: Annotated[Path, typer.Option()]) -> None:
    """Convert a YAML file of axolotl, LLaMA-Factory or mlx-lm. Prints the recipe's path.

    Keys without a counterpart are listed with their values.

    Args:
        file (FILE): YAML file of another program.
        out (FILE): Recipe to write.
    """
    if out.exists():
        raise OutputError(f"'{out}' exists already.", fix="Choose another name with --out.")
    from peftkit.config.schema import dump_yaml, from_dict
    from peftkit.recipe import Recipe

    values, lost = converted(read(file), file.parent)
    recipe = from_dict(Recipe, values, str(file))
    head = [f"# Converted from {file.name} by peftkit import-recipe."]
    head += [f"# No counterpart: {key}: {json.dumps(value)}" for key, value in lost.items()]
    write_recipe(out, "\n".join([*head, dump_yaml(recipe, only_set=True)]))
    typer.echo(out)
    for key, value in lost.items():
        note(f"no counterpart: {key}: {json.dumps(value)}")
    note(f"Next: peftkit check {out}")


def read(file: Path) -> Settings:
    """Return the settings of a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not a mapping.
    """
    import yaml

    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read '{file}'.", found=str(error)) from None
    if not isinstance(settings, dict):
        raise ConfigError(f"'{file}' has no settings.", found=f"It contains {settings!r:.60}.")
    return settings


def converted(theirs: Settings, folder: Path) -> tuple[Settings, Settings]:
    """Convert settings; return a recipe's values by section, and settings without a counterpart.

    Args:
        folder: Folder of the file, with its data sets.

    Raises:
        ConfigError: The settings are not from one of these programs.
    """
    table = read(TABLE)
    if "base_model" in theirs:
        program, data = table["axolotl"], axolotl_data
    elif "model_name_or_path" in theirs:
        program, data = table["llama_factory"], llama_factory_data
        rank = theirs.get("lora_rank") or program["defaults"]["lora_rank"]
        theirs.setdefault("lora_alpha", 2 * int(rank))
        has_type = theirs.get("quantization_bit") == 4 and theirs.get("quantization_type")
        theirs.pop("quantization_bit" if has_type else "quantization_type", None)
    elif "model" in theirs and not theirs.keys().isdisjoint(MLX_LM):
        program, data = table["mlx_lm"], mlx_lm_data
        theirs = flat_mlx_lm(theirs)
    else:
        raise ConfigError(
            "this is not YAML of axolotl, LLaMA-Factory or mlx-lm.",
            found="It has neither base_model, nor model_name_or_path, nor model with one of "
            f"{', '.join(MLX_LM)}.",
        )
    ours: Settings = {"method": {"type": "lora"}}
    lost = data(theirs, folder, ours)
    left_out = {*lost, *DATA_KEYS, *(["pref_loss"] if theirs.get("stage") == "kto" else [])}
    rules = table["both"] | program["keys"]
    for key, value in (program["defaults"] | theirs).items():
        if key in left_out or value in (None, ""):
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
    elif "prompt" not in ours.get("task", {}) and (task := ours.pop("task", None)):
        lost |= {f"task.{key}": value for key, value in task.items() if key != "type"}
        ours |= {"task": {"type": task["type"]}} if "type" in task else {}
    whole = ours["method"].get("train_fully", ())
    if "new_tokens" in ours.get("base", {}) and not TABLES.isdisjoint(whole):
        # ours trains the rows of new tokens, not whole tables as well
        lost["train_fully"] = [name for name in whole if name in TABLES]
        ours["method"]["train_fully"] = [name for name in whole if name not in TABLES]
    if start := ours["method"].get("start_from"):
        ours["method"] = {"start_from": start}  # the adapter defines the other settings
    return ours, lost


def translated(value: Any, **rule: Any) -> Any:
    """Return our value for a value of another program; None if nothing must be set.

    Args:
        rule: The entry of the key in the table.

    Raises:
        KeyError, TypeError, ValueError: The value has no counterpart.
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
    """Return a list of names; a string may contain several."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def axolotl_data(theirs: Settings, folder: Path, ours: Settings) -> Settings:
    """Put axolotl's data sets into `ours`; return the settings without a counterpart."""
    lost: Settings = {}
    fields = {
        tuple(prompt_fields(entry).items())
        for key in ("datasets", "test_datasets")
        for entry in theirs.get(key) or ()
    }
    named = dict(fields.pop()) if len(fields) == 1 else {}
    if named:
        prompt, completion = named.values()
        put(ours, "task", {"type": "causal_lm", "prompt": prompt, "completion": completion})
    for key, place in (("datasets", "train"), ("test_datasets", "eval")):
        paths = []
        for n, entry in enumerate(theirs.get(key) or ()):
            kind = entry.get("type")
            rest = {**entry, **kind, "type": "alpaca"} if isinstance(kind, dict) else dict(entry)
            files = rest.pop("data_files", None)
            path, split = files or rest.pop("path", None), rest.pop("split", None)
            rest.pop("path", None)
            rest.pop("ds_type", None)
            if str(rest.get("type")).split(".")[0] in AXOLOTL_TYPES:
                rest.pop("type")
            several = path if isinstance(path, list) else [path]
            paths += [f"{p}:{split}" if split and not files else str(p) for p in several]
            lost |= {
                f"{key}[{n}].{name}": value
                for name, value in rest.items()
                if name not in named and not (name in FIELDS and is_standard({name: value}))
            }
        put_files(ours, place, paths, lost, key)
    return lost


def prompt_fields(entry: Settings) -> Settings:
    """Return the fields with prompt and completion that an entry of axolotl names, {} if none."""
    kind = entry.get("type")
    settings = {**entry, **kind} if isinstance(kind, dict) else entry
    fields = {name: settings.get(name) for name in ("field_instruction", "field_output")}
    others = [name for name in ("field_input", "field_system") if settings.get(name)]
    return {} if others or None in fields.values() or is_standard(fields) else fields


AXOLOTL_TYPES = ("alpaca", "chat_template", "sharegpt", "completion", "input_output", "chatml")
"""Formats that peftkit detects from the fields of a row."""


def llama_factory_data(theirs: Settings, folder: Path, ours: Settings) -> Settings:
    """Put LLaMA-Factory's data sets into `ours`; return the settings without a counterpart."""
    lost: Settings = {}
    place = folder / str(theirs.get("dataset_dir", "data"))
    is_online = theirs.get("dataset_dir") == "ONLINE"
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
                if not is_online and "hf_hub_url" not in about:
                    info = f"{place / 'dataset_info.json'} names no file or data set"
                    lost[f"{key}.{name}"] = f"set data.{ours_key}: {info} for it"
            rest = {k: about[k] for k in ("columns", "tags") if not is_standard(about.get(k, {}))}
            lost |= {f"dataset_info.{name}.{k}": value for k, value in rest.items()}
        put_files(ours, ours_key, paths, lost, key)
    stage = theirs.get("stage", "sft")
    if stage == "rm":
        put(ours, "task.type", "reward")
    elif stage in ("dpo", "kto"):
        put(ours, "task.loss", stage)
    elif stage not in ("sft", "pt"):
        lost["stage"] = stage
    return lost


def is_standard(columns: Settings) -> bool:
    """Return whether peftkit detects a format from these names of columns or tags."""
    from peftkit.data.examples import ANSWERS, QUESTIONS, TURNS
    from peftkit.data.messages import MARKS, role_of

    names = {
        "prompt": QUESTIONS,
        "query": ("input", "context"),
        "response": ANSWERS,
        "messages": TURNS,
        "instruction": QUESTIONS,
        "output": ANSWERS,
        "input": ("input", "context"),
        "kto_tag": ("label",),
        "role": ("role", "from"),
        "content": ("content", "value"),
        "training": MARKS,
    }
    for column, name in columns.items():
        if column in PROPERTIES:
            if not is_standard(name):
                return False
            continue
        place = column.removeprefix("message_").removeprefix("field_")
        place = place.removesuffix("_tag") if place in ("role_tag", "content_tag") else place
        is_role = column.endswith("_tag") and bool(role_of({"role": name}))
        if name not in names.get(place, (place,)) and not is_role:
            return False
    return True


PROPERTIES = ("message_property_mappings",)
FIELDS = (
    *("field_instruction", "field_input", "field_output", "field_system", "field_messages"),
    *("field_tools", "message_field_role", "message_field_content", "message_field_training"),
    *PROPERTIES,
)
"""Settings of axolotl's data sets that name a field."""


MLX_LM = ("fine_tune_type", "lora_parameters", "adapter_path", "iters")
"""Keys that identify the YAML of mlx-lm."""


def flat_mlx_lm(theirs: Settings) -> Settings:
    """Flatten the settings of mlx-lm to the keys of the table."""
    defaults = read(TABLE)["mlx_lm"]["defaults"]
    flat = {k: v for k, v in theirs.items() if k not in ("lora_parameters", "lr_schedule")}
    lora = theirs.get("lora_parameters") or {}
    flat |= {f"lora_{name}": value for name, value in lora.items() if name != "keys"}
    if keys := lora.get("keys"):
        flat["lora_keys"] = [str(key).rpartition(".")[2] for key in keys]
    rank, scale = (flat.get(name, defaults[name]) for name in ("lora_rank", "lora_scale"))
    flat["lora_scale"] = round(float(rank) * float(scale), 6)  # scale = alpha / rank
    flat.setdefault("iters", defaults["iters"])
    batches = flat.get("grad_accumulation_steps")
    for name in ("iters", "save_every", "steps_per_eval"):  # in batches; warmup is in steps
        if isinstance(batches, int) and batches > 1 and isinstance(flat.get(name), int):
            flat[name] = max(flat[name] // batches, 1)
    schedule = theirs.get("lr_schedule") or {}
    flat |= {f"lr_schedule.{name}": value for name, value in schedule.items()}
    warmup, steps = flat.get("lr_schedule.warmup"), flat["iters"]
    if isinstance(warmup, int) and isinstance(steps, int) and warmup < steps:  # else it is lost
        flat["warmup_ratio"] = flat.pop("lr_schedule.warmup") / steps
    return flat


def mlx_lm_data(theirs: Settings, folder: Path, ours: Settings) -> Settings:
    """Put mlx-lm's data folder or data set into `ours`; all of it has a counterpart."""
    from peftkit_cli.start.survey import splits_of, survey

    place = folder / str(theirs.get("data", "data"))
    splits = splits_of(place) if place.is_dir() else {}
    put(ours, "data.train", splits.get("train", str(theirs.get("data", "data"))))
    if "eval" in splits:
        put(ours, "data.eval", splits["eval"])
    if "train" in splits and (
        plain := survey(splits["train"]).plain
    ):  # mlx-lm treats them as a chat
        put(ours, "task", {"type": "causal_lm", "prompt": plain[0], "completion": plain[1]})
    return {}


def put_files(ours: Settings, place: str, paths: list[str], lost: Settings, key: str) -> None:
    """Set data.train to files, or data.eval to one file."""
    if place == "eval" and len(paths) > 1:
        lost[key] = paths
    elif paths:
        several = [{"path": path} for path in paths]
        put(ours, f"data.{place}", paths[0] if len(paths) == 1 else several)


def put(ours: Settings, place: str, value: object) -> None:
    """Set a value by its dotted key."""
    *sections, name = place.split(".")
    for section in sections:
        ours = ours.setdefault(section, {})
    ours[name] = value
