"""The table of methods, in `peftkit inspect MODEL` and in the README: told by the classes."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from peftkit.adapter import attach
from peftkit.methods.table import METHODS
from peftkit_cli.inspect import method_facts, method_rows
from tests.helpers.families import ARCHITECTURES

README = Path(__file__).parents[2] / "README.md"
SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)


def on_meta(build) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_the_readme_has_the_table_of_smollm2():
    model = on_meta(lambda: LlamaForCausalLM(SMOLLM2))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert round(num_parameters / 1e6, 1) == 134.5
    lines = README.read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    shown = {}
    for first, *cells in (row for row in table if len(row) == 4):
        names = [name for name in re.findall(r"`(\w+)`", first) if name in METHODS]
        values = re.split(r"(?<=\)), ", cells[0]) if len(names) > 1 else cells[:1]
        if names:
            shown |= {n: (value, *cells[1:]) for n, value in zip(names, values, strict=True)}
    assert shown == {
        name: (
            "none (it has no biases)" if trains == "-" else trains,
            merges,
            read_by.partition(", ")[2] or "none",
        )
        for name, trains, merges, _, read_by, _ in method_rows(
            list(method_facts(model)), num_parameters
        )
    }


def test_inspect_shows_what_each_method_would_train(peftkit, model_folder):
    done = peftkit("inspect", model_folder, "--json")
    assert (done.code, done.err) == (0, "")
    facts = {row["method"]: row for row in json.loads(done.out)["methods"]}
    assert list(facts) == list(METHODS)
    lora = attach(ARCHITECTURES["llama"](), METHODS["lora"]())
    assert facts["lora"]["num_trainable"] == lora.num_trainable
    assert facts["bitfit"]["num_trainable"] is None
    assert facts["bitfit"]["remark"] == "there is no bias to train in LlamaForCausalLM"
    assert (facts["bottleneck"]["merges"], facts["bottleneck"]["files"]) == (False, "peftkit")
    shown = peftkit("inspect", model_folder).out
    assert "Methods, each with its defaults" in shown
    assert "it adds tokens to the input and changes no weight" in shown


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "vit"])
def test_a_skeleton_of_any_kind_has_its_table(name):
    model = on_meta(ARCHITECTURES[name])
    before = {path: type(module) for path, module in model.named_modules()}
    facts = list(method_facts(model))
    assert [one.method for one in facts] == list(METHODS)
    assert all(one.num_trainable or one.remark for one in facts)
    assert {path: type(module) for path, module in model.named_modules()} == before
