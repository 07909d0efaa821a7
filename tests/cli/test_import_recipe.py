"""`peftkit import-recipe`: settings of other programs as a recipe of ours."""

import json
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from peftkit.config.explain import sections_of
from peftkit.recipe import Recipe, load
from peftkit_cli.import_recipe import TABLE
from tests.helpers.command_line import Run
from tests.helpers.folders import write_rows

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
    (folder / "ours.yaml").unlink(missing_ok=True)
    if not (info := folder / "data" / "dataset_info.json").exists():
        info.parent.mkdir(exist_ok=True)
        files = {name: {"file_name": f"{name}.json"} for name in ("mine", "identity")}
        info.write_text(json.dumps(files), encoding="utf-8")
    done = peftkit("import-recipe", "theirs.yaml", "--out", "ours.yaml")
    assert done[:2] == (0, "ours.yaml\n"), done.err
    lost = [line.split(": ")[1] for line in done.err.splitlines() if "no counterpart" in line]
    commented = (folder / "ours.yaml").read_text(encoding="utf-8")
    assert all(f"# No counterpart: {key}: " in commented for key in lost)
    return load(folder / "ours.yaml"), lost


def test_axolotl(peftkit, tmp_path):
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
        *("datasets[1].field_messages", "deepspeed", "excess_length_strategy"),
        *("special_tokens", "warmup_steps"),
    ]


MINIMAL = {
    "axolotl": (
        "base_model: org/model\nlearning_rate: 1e-5\nlora_r: 8\nlora_alpha: 16\n"
        "datasets: [{path: rows.jsonl, type: alpaca}]\n"
    ),
    "llama_factory": "model_name_or_path: org/model\ndataset: mine\n",
    "mlx_lm": "model: org/model\niters: 10\ndata: org/rows\n",
}


@pytest.mark.parametrize(
    ("program", "values", "lost"),
    [
        (
            "axolotl",
            (1, 1.0, "cosine", 0.03, 0.0, 512, False, 16),
            {"adapter", "excess_length_strategy"},
        ),
        ("llama_factory", (8, 3.0, "linear", 0.0, 0.0, 2048, False, 16), set()),
        ("mlx_lm", (4, 3.0, "constant", 0.0, 0.0, 2048, True, 160), {"mask_prompt", "num_layers"}),
    ],
)
def test_defaults_of_another_program_are_set_or_reported(program, values, lost, peftkit, tmp_path):
    recipe, found = recipe_of(peftkit, tmp_path, MINIMAL[program])
    train, data, alpha = recipe.train, recipe.data, recipe.method.model_dump()["alpha"]
    settings = (train.batch_size, train.epochs, train.schedule, train.warmup_ratio)
    settings += (train.weight_decay, data.max_length, data.packing, alpha)
    assert settings == values
    assert set(found) == lost


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("axolotl", 'adapter: lora\ntokens: ["<ask>", "</ask>"]\n'),
        ("llama_factory", "new_special_tokens: <ask>,</ask>\nresize_vocab: true\n"),
    ],
)
def test_new_tokens_are_those_of_the_base(program, line, peftkit, tmp_path):
    recipe, lost = recipe_of(peftkit, tmp_path, MINIMAL[program] + line)
    assert recipe.base.new_tokens == ("<ask>", "</ask>")
    assert set(lost) <= {"excess_length_strategy"}
    key = "lora_modules_to_save" if program == "axolotl" else "additional_target"
    more = f"{line}{key}: [embed_tokens, score, lm_head]\n"
    recipe, lost = recipe_of(peftkit, tmp_path, MINIMAL[program] + more)
    assert recipe.method.model_dump()["train_fully"] == ("score",)
    assert "train_fully" in lost  # the whole tables


@pytest.mark.parametrize(
    ("entry", "task", "lost"),
    [
        ("type: alpaca, field_instruction: q, field_output: a", ("q", "a"), []),
        ("type: {field_instruction: q, field_output: a}", ("q", "a"), []),
        ("type: alpaca, field_instruction: question, field_output: answer", (None, None), []),
        (
            "type: {field_instruction: q, field_output: a, field_input: c}",
            (None, None),
            ["field_input", "field_instruction", "field_output"],
        ),
        (
            "type: chat_template, field_messages: conversations, message_field_training: train, "
            "message_property_mappings: {role: from, content: value}",
            (None, None),
            [],
        ),
        (
            "type: chat_template, message_property_mappings: {role: who, content: value}",
            (None, None),
            ["message_property_mappings"],
        ),
    ],
)
def test_fields_that_axolotl_names_are_mapped_or_reported(entry, task, lost, peftkit, tmp_path):
    text = MINIMAL["axolotl"].replace("type: alpaca", entry) + "adapter: lora\n"
    recipe, found = recipe_of(peftkit, tmp_path, text)
    settings = recipe.task.model_dump()
    assert (settings["prompt"], settings["completion"]) == task
    assert sorted(found) == sorted(
        ["excess_length_strategy", *(f"datasets[0].{name}" for name in lost)]
    )


@pytest.mark.parametrize("program", ["axolotl", "llama_factory"])
def test_the_project_and_the_strategy_of_evaluations_are_mapped(program, peftkit, tmp_path):
    more = "wandb_project: orders\neval_strategy: steps\neval_steps: 7\n"
    recipe, lost = recipe_of(peftkit, tmp_path, MINIMAL[program] + more)
    assert recipe.train.trackers == {"wandb": {"experiment": "orders"}}
    assert recipe.train.eval_every == 7
    assert set(lost) <= {"adapter", "excess_length_strategy"}
    recipe, lost = recipe_of(peftkit, tmp_path, MINIMAL[program] + "wandb_project:\n")
    assert recipe.train.trackers == {}
    _, lost = recipe_of(peftkit, tmp_path, MINIMAL[program] + "eval_strategy: epoch\n")
    assert "eval_strategy" in lost


def test_a_data_set_of_llama_factory_is_no_file_name(peftkit, tmp_path):
    text = MINIMAL["llama_factory"].replace("mine", "mine,other")
    _, lost = recipe_of(peftkit, tmp_path, text)
    assert lost == ["dataset.other"]
    _, lost = recipe_of(peftkit, tmp_path, text + "dataset_dir: elsewhere\n")
    assert lost == ["dataset.mine", "dataset.other"]
    _, lost = recipe_of(peftkit, tmp_path, text + "dataset_dir: ONLINE\n")
    assert lost == []


def test_llama_factory(peftkit, tmp_path):
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
    ("bits", "kind", "expected"), [(4, "fp4", "fp4"), (8, "nf4", "int8"), (None, "nf4", "none")]
)
def test_the_type_of_four_bits_counts_with_four_bits(bits, kind, expected, peftkit, tmp_path):
    bit = f"quantization_bit: {bits}\n" if bits else ""
    text = LLAMA_FACTORY.replace("quantization_bit: 4\n", f"quantization_type: {kind}\n{bit}")
    recipe, lost = recipe_of(peftkit, tmp_path, text)
    assert recipe.base.quantize == expected
    assert lost == ["template"]


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ("stage: dpo\npref_loss: sigmoid\npref_beta: 0.2\n", "dpo"),
        ("stage: dpo\npref_loss: simpo\npref_beta: 0.2\nsimpo_gamma: 0.4\n", "simpo"),
        ("stage: kto\npref_beta: 0.2\n", "kto"),
    ],
)
def test_preferences(changes, loss, peftkit, tmp_path):
    text = LLAMA_FACTORY.replace("stage: sft\n", changes)
    recipe, lost = recipe_of(peftkit, tmp_path, text)
    task = recipe.task.model_dump()
    assert (task["type"], task["loss"], task["beta"]) == ("preference", loss, 0.2)
    assert lost == ["template"]


MLX_LM = """\
model: org/model
train: true
fine_tune_type: dora
data: rows
num_layers: -1
batch_size: 2
iters: 500
learning_rate: 1e-5
steps_per_eval: 100
adapter_path: adapters
lora_parameters: {keys: [self_attn.q_proj, self_attn.v_proj], rank: 16, scale: 2.0, dropout: 0.1}
lr_schedule: {name: cosine_decay, warmup: 50, arguments: [1e-5, 500]}
mask_prompt: true
"""


def test_iterations_of_mlx_lm_are_of_one_batch_each(peftkit, tmp_path):
    more = "grad_accumulation_steps: 8\nsave_every: 4\n"
    recipe, lost = recipe_of(peftkit, tmp_path, MLX_LM + more)
    train = recipe.train
    assert (train.gradient_accumulation, train.max_steps) == (8, 62)  # 4 batches give no step
    assert (train.eval_every, train.save_every) == (12, 1)
    assert train.warmup_ratio == 50 / 62  # their schedule counts steps
    assert lost == ["lr_schedule.arguments"]


def test_an_mlx_lm_warmup_longer_than_its_run_is_reported(peftkit, tmp_path):
    _, lost = recipe_of(peftkit, tmp_path, MLX_LM + "grad_accumulation_steps: 16\n")
    assert sorted(lost) == ["lr_schedule.arguments", "lr_schedule.warmup"]  # 50 of 31 steps


def test_mlx_lm(peftkit, tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("train", "valid"):
        write_rows(tmp_path / "rows" / f"{name}.jsonl", [{"prompt": "a", "completion": "b"}])
    recipe, lost = recipe_of(peftkit, tmp_path, MLX_LM)
    method = recipe.method.model_dump()
    assert (method["type"], method["rank"], method["alpha"]) == ("dora", 16, 32)
    assert (tuple(method["targets"]), method["dropout"]) == (("q_proj", "v_proj"), 0.1)
    task = recipe.task.model_dump()
    assert (task["prompt"], task["completion"]) == ("prompt", "completion")  # a chat, as there
    assert (recipe.data.train, recipe.data.eval) == ("rows/train.jsonl", "rows/valid.jsonl")
    train = recipe.train
    assert (train.max_steps, train.batch_size, train.learning_rate) == (500, 2, 1e-5)
    assert (train.schedule, train.warmup_ratio, train.eval_every) == ("cosine", 0.1, 100)
    assert lost == ["lr_schedule.arguments"]
    text = (tmp_path / "ours.yaml").read_text(encoding="utf-8")
    assert "gradient_accumulation" not in text, "only what was set is written"
    refused = peftkit("train", "theirs.yaml")
    assert "It has the key fine_tune_type, like the YAML of mlx-lm." in refused.err


@pytest.mark.parametrize(
    ("columns", "lost"),
    [
        ({"prompt": "instruction", "query": "input", "response": "output"}, []),
        ({"messages": "conversations", "tools": "tools"}, []),
        ({"prompt": "Frage", "response": "Antwort"}, ["dataset_info.mine.columns", "template"]),
    ],
)
def test_recognised_columns_are_not_reported_as_lost(columns, lost, peftkit, tmp_path):
    (tmp_path / "data").mkdir()
    about = {"mine": {"file_name": "mine.json", "columns": columns}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(about))
    text = LLAMA_FACTORY.replace("mine, identity", "mine")
    assert recipe_of(peftkit, tmp_path, text)[1] == (lost or ["template"])


@pytest.mark.parametrize(
    "text",
    [
        "model: x\n",
        "model: x\niters: many\n",
        "- a\n",
        "a: [\n",
        "model_name_or_path: [1]\ndataset: x\n",
    ],
)
def test_what_is_of_no_such_program_is_refused(text, peftkit, tmp_path):
    (tmp_path / "theirs.yaml").write_text(text, encoding="utf-8")
    done = peftkit("import-recipe", "theirs.yaml", "--out", "ours.yaml")
    assert "ConfigError: " in done.refusal()
    assert not (tmp_path / "ours.yaml").exists()


def test_every_line_of_the_table_leads_to_a_setting_of_ours():
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    tables = [
        table["both"],
        *(table[name]["keys"] for name in ("axolotl", "llama_factory", "mlx_lm")),
    ]
    for key, rule in (line for lines in tables for line in lines.items()):
        assert set(rule) <= {"to", "as", "values"}, key
        kinds: list[type[BaseModel]] = [Recipe]
        for name in rule.get("to", "base").split("."):
            if name == "wandb":  # its options are free
                break
            having = [kind for kind in kinds if name in kind.model_fields]
            assert having, f"{key}: {rule['to']}"
            kinds = [inner for kind in having for inner in sections_of(kind.model_fields[name])]
