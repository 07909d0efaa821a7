"""`peftkit import-recipe`: settings of axolotl and LLaMA-Factory as a recipe of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from peftkit.config.explain import sections_of
from peftkit.recipe import Recipe, load
from peftkit_cli.import_recipe import TABLE
from tests.command_line import Run

AXOLOTL = """\
base_model: org/model
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - {path: org/rows, type: alpaca, split: train}
  - {path: rows.jsonl, type: chat_template, field_messages: talk}
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_steps: 10
bf16: auto
flash_attention: true
deepspeed: zero2.json
special_tokens: {pad_token: "<pad>"}
"""
LLAMA_FACTORY = """\
model_name_or_path: org/model
stage: sft
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: mine, identity
template: llama3
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
output_dir: saves/lora
quantization_bit: 4
report_to: none
"""


def recipe_of(peftkit: Run, folder: Path, text: str) -> tuple[Recipe, list[str]]:
    """Convert a file; return the recipe and the keys that were named as lost."""
    (folder / "theirs.yaml").write_text(text, encoding="utf-8")
    done = peftkit("import-recipe", "theirs.yaml", "--out", "ours.yaml")
    assert done[:2] == (0, "ours.yaml\n"), done.err
    lost = [line.split(": ")[1] for line in done.err.splitlines() if "no counterpart" in line]
    commented = (folder / "ours.yaml").read_text(encoding="utf-8")
    assert all(f"# No counterpart: {key}: " in commented for key in lost)
    return load(folder / "ours.yaml"), lost


def test_axolotl(peftkit: Run, tmp_path: Path) -> None:
    recipe, lost = recipe_of(peftkit, tmp_path, AXOLOTL)
    assert (recipe.base.model, recipe.base.quantize) == ("org/model", "nf4")
    method = recipe.method.model_dump()
    assert [method[name] for name in ("type", "rank", "alpha", "dropout", "targets")] == [
        *("lora", 32, 16, 0.05, "all-linear")
    ]
    assert not isinstance(recipe.data.train, str)
    assert [source.path for source in recipe.data.train] == ["org/rows:train", "rows.jsonl"]
    assert (recipe.data.eval, recipe.data.max_length, recipe.data.packing) == (0.05, 4096, True)
    train = recipe.train
    assert (train.batch_size, train.gradient_accumulation, train.epochs) == (2, 4, 3.0)
    assert (train.optimizer, train.learning_rate) == ("paged_adamw_8bit", 2e-4)
    assert sorted(lost) == [
        *("datasets[1].field_messages", "deepspeed", "special_tokens", "warmup_steps")
    ]


def test_llama_factory(peftkit: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    about = {"mine": {"file_name": "mine.json"}, "identity": {"hf_hub_url": "org/identity"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(about))
    recipe, lost = recipe_of(peftkit, tmp_path, LLAMA_FACTORY)
    assert (recipe.base.quantize, recipe.base.dtype) == ("nf4", "bf16")
    method = recipe.method.model_dump()
    assert (method["rank"], method["alpha"]) == (8, 16)
    assert tuple(method["targets"]) == ("q_proj", "v_proj")
    assert not isinstance(recipe.data.train, str)
    assert [source.path for source in recipe.data.train] == ["data/mine.json", "org/identity"]
    assert (recipe.data.packing, recipe.train.schedule) == (False, "cosine")
    assert str(recipe.train.output_dir) == "saves/lora"
    assert lost == ["template"]


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ("stage: dpo\npref_loss: sigmoid\npref_beta: 0.2\n", "dpo"),
        ("stage: dpo\npref_loss: simpo\npref_beta: 0.2\nsimpo_gamma: 0.4\n", "simpo"),
        ("stage: kto\npref_beta: 0.2\n", "kto"),
    ],
)
def test_preferences(changes: str, loss: str, peftkit: Run, tmp_path: Path) -> None:
    text = LLAMA_FACTORY.replace("stage: sft\n", changes)
    recipe, lost = recipe_of(peftkit, tmp_path, text)
    task = recipe.task.model_dump()
    assert (task["type"], task["loss"], task["beta"]) == ("preference", loss, 0.2)
    assert lost == ["template"]


@pytest.mark.parametrize(
    "text", ["model: x\n", "- a\n", "a: [\n", "model_name_or_path: [1]\ndataset: x\n"]
)
def test_what_is_of_neither_program_is_refused(text: str, peftkit: Run, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(text, encoding="utf-8")
    done = peftkit("import-recipe", "theirs.yaml", "--out", "ours.yaml")
    assert (done.code, done.out) == (2, "")
    assert "ConfigError: " in done.err
    assert not (tmp_path / "ours.yaml").exists()


def test_every_line_of_the_table_leads_to_a_setting_of_ours() -> None:
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    tables = [table["both"], *(table[name]["keys"] for name in ("axolotl", "llama_factory"))]
    for key, rule in (line for lines in tables for line in lines.items()):
        assert set(rule) <= {"to", "as", "values"}, key
        kinds: list[type[BaseModel]] = [Recipe]
        for name in rule.get("to", "base").split("."):
            having = [kind for kind in kinds if name in kind.model_fields]
            assert having, f"{key}: {rule['to']}"
            kinds = [inner for kind in having for inner in sections_of(kind.model_fields[name])]
