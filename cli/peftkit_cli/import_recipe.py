"""`peftkit import-recipe`: a recipe from axolotl's or LLaMA-Factory's YAML."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from peftkit.errors import ConfigError, OutputError
from peftkit_cli.arguments import note

Settings = dict[str, Any]
DROP: Any = object()
"""What a value of theirs becomes that asks for what peftkit does anyway."""


def one_of(**known: Any) -> Callable[[Any], Any]:
    """Return a translation of names; another name has no counterpart."""
    return lambda value: known[str(value)]


def only(*wanted: Any) -> Callable[[Any], Any]:
    """Return a translation of values that ask for what peftkit does anyway."""

    def check(value: Any) -> Any:
        if value not in wanted:
            raise KeyError(value)
        return DROP

    return check


def when_true(value: str) -> Callable[[Any], Any]:
    """Return a translation of a flag: it sets a value, or nothing."""
    return lambda flag: value if flag else DROP


def names(value: Any) -> Any:
    """Return a list of names; one text may hold several."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def same(value: Any) -> Any:
    """Return a value as it is."""
    return value


def number(value: Any) -> float:
    """Return a number; YAML reads 1e-4 as a text."""
    return float(value)


SCHEDULES = one_of(cosine="cosine", linear="linear", constant="constant")
OPTIMIZERS = one_of(
    adamw_torch="adamw",
    adamw_torch_fused="adamw",
    adamw_8bit="adamw_8bit",
    adamw_bnb_8bit="adamw_8bit",
    paged_adamw_32bit="paged_adamw",
    paged_adamw_8bit="paged_adamw_8bit",
)
LOSSES = one_of(
    sigmoid="dpo", dpo="dpo", hinge="hinge", ipo="ipo", orpo="orpo", simpo="simpo", kto="kto"
)
Table = dict[str, tuple[str, Callable[[Any], Any]]]
TRAINER: Table = {
    "output_dir": ("train.output_dir", same),
    "learning_rate": ("train.learning_rate", number),
    "max_steps": ("train.max_steps", same),
    "gradient_accumulation_steps": ("train.gradient_accumulation", same),
    "gradient_checkpointing": ("train.gradient_checkpointing", same),
    "warmup_ratio": ("train.warmup_ratio", number),
    "weight_decay": ("train.weight_decay", number),
    "max_grad_norm": ("train.max_grad_norm", number),
    "seed": ("train.seed", same),
    "eval_steps": ("train.eval_every", same),
    "save_steps": ("train.save_every", same),
    "save_total_limit": ("train.keep_checkpoints", same),
    "load_best_model_at_end": ("train.keep_best", same),
    "bf16": ("base.dtype", when_true("bf16")),
    "fp16": ("base.dtype", when_true("fp16")),
    "lora_alpha": ("method.alpha", same),
    "lora_dropout": ("method.dropout", number),
    "loraplus_lr_ratio": ("train.loraplus_ratio", number),
    "use_wandb": ("train.log_to", when_true("wandb")),
}
"""Their key -> ours, and how a value is translated; both programs have these."""
AXOLOTL: Table = TRAINER | {
    "base_model": ("base.model", same),
    "revision_of_model": ("base.revision", same),
    "load_in_4bit": ("base.quantize", when_true("nf4")),
    "load_in_8bit": ("base.quantize", when_true("int8")),
    "adapter": ("", only("lora", "qlora")),
    "lora_model_dir": ("method.start_from", same),
    "lora_r": ("method.rank", same),
    "lora_target_modules": ("method.targets", names),
    "lora_target_linear": ("method.targets", when_true("all-linear")),
    "lora_modules_to_save": ("method.train_fully", names),
    "lora_rank_pattern": ("method.rank_pattern", same),
    "lora_alpha_pattern": ("method.alpha_pattern", same),
    "peft_use_dora": ("method.type", when_true("dora")),
    "peft_use_rslora": ("method.rslora", same),
    "peft_init_lora_weights": (
        "method.init",
        one_of(gaussian="gaussian", pissa="pissa", olora="olora", eva="eva", loftq="loftq"),
    ),
    "val_set_size": ("data.eval", lambda share: number(share) or DROP),
    "sequence_len": ("data.max_length", same),
    "sample_packing": ("data.packing", same),
    "chat_template": ("data.chat_template", one_of(tokenizer_default=DROP, chatml="chatml")),
    "train_on_inputs": ("", only(False, None)),
    "micro_batch_size": ("train.batch_size", same),
    "num_epochs": ("train.epochs", number),
    "lr_scheduler": ("train.schedule", SCHEDULES),
    "optimizer": ("train.optimizer", OPTIMIZERS),
    "rl": ("task.loss", LOSSES),
    "rl_beta": ("task.beta", number),
    "dpo_beta": ("task.beta", number),
    "wandb_project": ("train.log_to", when_true("wandb")),
    "early_stopping_patience": ("train.early_stopping.patience", same),
    "flash_attention": ("", only(True, False, None)),
    "dataset_prepared_path": ("", same),
    "logging_steps": ("", same),
    "strict": ("", only(False, None)),
}
AXOLOTL_DEFAULTS: Settings = {
    "sequence_len": 512,
    "sample_packing": False,
    "micro_batch_size": 1,
    "num_epochs": 1.0,
    "lr_scheduler": "cosine",
}
"""What their key is where the file says nothing, as far as ours is another; of axolotl 0.19."""
LLAMA_FACTORY: Table = TRAINER | {
    "model_name_or_path": ("base.model", same),
    "model_revision": ("base.revision", same),
    "adapter_name_or_path": ("method.start_from", same),
    "quantization_bit": ("base.quantize", lambda bits: {4: "nf4", 8: "int8"}[bits]),
    "quantization_type": ("base.quantize", one_of(nf4="nf4", fp4="fp4")),
    "double_quantization": ("base.double_quant", same),
    "finetuning_type": ("", only("lora")),
    "do_train": ("", only(True)),
    "lora_rank": ("method.rank", same),
    "lora_target": (
        "method.targets",
        lambda value: "all-linear" if value == "all" else names(value),
    ),
    "additional_target": ("method.train_fully", names),
    "use_dora": ("method.type", when_true("dora")),
    "use_rslora": ("method.rslora", same),
    "pissa_init": ("method.init", when_true("pissa")),
    "val_size": ("data.eval", lambda share: number(share) or DROP),
    "cutoff_len": ("data.max_length", same),
    "packing": ("data.packing", same),
    "train_on_prompt": ("", only(False)),
    "per_device_train_batch_size": ("train.batch_size", same),
    "num_train_epochs": ("train.epochs", number),
    "lr_scheduler_type": ("train.schedule", SCHEDULES),
    "optim": ("train.optimizer", OPTIMIZERS),
    "pref_loss": ("task.loss", LOSSES),
    "pref_beta": ("task.beta", number),
    "dpo_label_smoothing": ("task.label_smoothing", number),
    "simpo_gamma": ("task.gamma", number),
    "report_to": ("train.log_to", lambda to: DROP if to in ("none", None) else names(to)),
    "early_stopping_steps": ("train.early_stopping.patience", same),
    "overwrite_cache": ("", same),
    "overwrite_output_dir": ("", same),
    "preprocessing_num_workers": ("", same),
    "dataloader_num_workers": ("", same),
    "logging_steps": ("", same),
    "plot_loss": ("", same),
    "flash_attn": ("", same),
}


LLAMA_FACTORY_DEFAULTS: Settings = {
    "lora_rank": 8,
    "lora_target": "all",
    "cutoff_len": 2048,
    "packing": False,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
}
"""The same of LLaMA-Factory 0.9.5 and transformers' TrainingArguments."""


def import_recipe(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="axolotl's or LLaMA-Factory's.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Recipe to write.")],
) -> None:
    """Convert a YAML file of axolotl or LLaMA-Factory. Prints the recipe's path.

    Each of its keys that has no counterpart is named, with its value.
    """
    if out.exists():
        raise OutputError(f"'{out}' exists already.", fix="Choose another name with --out.")
    from peftkit.config.schema import dump_yaml, from_dict
    from peftkit.run.config import Recipe

    values, lost = converted(read(file), file.parent)
    recipe = from_dict(Recipe, values, str(file))
    head = [f"# Made from {file.name} by peftkit import-recipe."]
    head += [f"# No counterpart: {key}: {json.dumps(value)}" for key, value in lost.items()]
    out.write_text("\n".join([*head, dump_yaml(recipe)]), encoding="utf-8")
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
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read '{file}'.", found=str(error)) from None
    if not isinstance(found, dict):
        raise ConfigError(f"'{file}' holds no settings.", found=f"It holds {found!r:.60}.")
    return found


def converted(theirs: Settings, folder: Path) -> tuple[Settings, Settings]:
    """Return a recipe's values by section, and what of their settings has no counterpart.

    Args:
        folder: Where LLaMA-Factory's dataset_dir is looked for.

    Raises:
        ConfigError: The settings are of neither program.
    """
    if "base_model" in theirs:
        table, data, defaults = AXOLOTL, axolotl_data, AXOLOTL_DEFAULTS
    elif "model_name_or_path" in theirs:
        table, data, defaults = LLAMA_FACTORY, llama_factory_data, LLAMA_FACTORY_DEFAULTS
        if "lora_alpha" not in theirs:
            theirs["lora_alpha"] = 2 * int(theirs.get("lora_rank") or defaults["lora_rank"])
    else:
        raise ConfigError(
            "this is neither axolotl's YAML nor LLaMA-Factory's.",
            found="It has neither base_model nor model_name_or_path.",
        )
    ours: Settings = {"method": {"type": "lora"}}
    lost = data(theirs, folder, ours)
    is_kto = theirs.get("stage") == "kto"
    for key, value in (defaults | theirs).items():
        if key in lost or value is None or key in DATA_KEYS or (is_kto and key == "pref_loss"):
            continue
        place, translate = table.get(key, (None, same))
        try:
            made = translate(value)
        except (KeyError, TypeError, ValueError):
            place = None
        if place is None:
            lost[key] = value
        elif place and made is not DROP:
            put(ours, place, made)
    if "loss" in ours.get("task", {}):
        ours["task"]["type"] = "preference"
        ours["data"].pop("packing", None)  # pairs are not packed
    elif task := ours.pop("task", None):
        lost |= {f"task.{key}": value for key, value in task.items() if key != "type"}
        ours |= {"task": {"type": task["type"]}} if "type" in task else {}
    if start := ours["method"].get("start_from"):
        ours["method"] = {"start_from": start}  # the rest is the adapter's own
    if isinstance(logs := ours.get("train", {}).get("log_to"), str):
        ours["train"]["log_to"] = [logs]
    return ours, lost


DATA_KEYS = ("datasets", "test_datasets", "dataset", "eval_dataset", "dataset_dir", "stage")


def axolotl_data(theirs: Settings, folder: Path, ours: Settings) -> Settings:
    """Put axolotl's data sets into `ours`; return what has no counterpart."""
    lost: Settings = {}
    for key, place in (("datasets", "train"), ("test_datasets", "eval")):
        found = []
        for n, one in enumerate(theirs.get(key) or ()):
            more = dict(one)
            files = more.pop("data_files", None)
            path, split = files or more.pop("path", None), more.pop("split", None)
            more.pop("path", None)
            more.pop("ds_type", None)
            if str(more.get("type")).split(".")[0] in AXOLOTL_TYPES:
                more.pop("type")
            several = path if isinstance(path, list) else [path]
            found += [f"{p}:{split}" if split and not files else str(p) for p in several]
            lost |= {f"{key}[{n}].{name}": value for name, value in more.items()}
        put_files(ours, place, found, lost, key)
    return lost


AXOLOTL_TYPES = ("alpaca", "chat_template", "sharegpt", "completion", "input_output", "chatml")
"""Of these the fields of a row say what they are."""


def llama_factory_data(theirs: Settings, folder: Path, ours: Settings) -> Settings:
    """Put LLaMA-Factory's data sets, by dataset_info.json, into `ours`; return what is lost."""
    lost: Settings = {}
    place = folder / str(theirs.get("dataset_dir", "data"))
    try:
        known = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    for key, ours_key in (("dataset", "train"), ("eval_dataset", "eval")):
        found = []
        for name in names(theirs.get(key) or ""):
            about = known.get(name, {})
            if "file_name" in about:
                found.append(str(place / about["file_name"]))
            elif name:
                found.append(about.get("hf_hub_url", name))
            more = {k: about[k] for k in ("columns", "tags") if k in about}
            lost |= {f"dataset_info.{name}.{k}": value for k, value in more.items()}
        put_files(ours, ours_key, found, lost, key)
    stage = theirs.get("stage", "sft")
    if stage == "rm":
        put(ours, "task.type", "reward")
    elif stage in ("dpo", "kto"):
        put(ours, "task.loss", stage)
    elif stage not in ("sft", "pt"):
        lost["stage"] = stage
    return lost


def put_files(ours: Settings, place: str, found: list[str], lost: Settings, key: str) -> None:
    """Put files into data.train or data.eval, which takes one alone."""
    if place == "eval" and len(found) > 1:
        lost[key] = found
    elif found:
        several = [{"path": path} for path in found]
        put(ours, f"data.{place}", found[0] if len(found) == 1 else several)


def put(ours: Settings, place: str, value: Any) -> None:
    """Set a value by its dotted place."""
    *sections, name = place.split(".")
    for section in sections:
        ours = ours.setdefault(section, {})
    ours[name] = value
