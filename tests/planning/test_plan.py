"""A plan is what the run then takes, and says what to change where that is too much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.plan import Measured, planned, reckoner_of
from peftkit import Recipe, plan_run
from peftkit.base.shapes import with_depth
from peftkit.config.schema import from_dict
from peftkit.errors import BaseError, ConfigError
from peftkit.planning.machines import parse_size
from peftkit.planning.plan import Plan
from peftkit.quant.layers import empty_packed, pack
from peftkit.tasks.seq2seq import Seq2SeqConfig
from peftkit.train.memory.blocks import Activations
from peftkit_cli.app import run
from tests.families import ARCHITECTURES

GB = 10**9


def llama(**changes: int) -> transformers.LlamaConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048}
    return transformers.LlamaConfig(**sizes | changes, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config of a model of 1.3B parameters, and nothing else."""
    found = tmp_path_factory.mktemp("large")
    config = llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=32000)
    config.max_position_embeddings = 1 << 18
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(found)
    return found


def a_plan(folder: Path, memory: str, *overrides: str) -> Plan:
    return plan_run(str(folder), memory=memory, overrides=overrides, measure=False)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_planned_peak_is_what_the_allocator_counts(quantize) -> None:
    reckoner, measured = reckoner_of(llama(), quantize), Measured(llama(), quantize)
    ways: tuple[tuple[Activations, int], ...] = (("keep", 256), ("recompute", 512))
    for way, length in ways:
        told, found = planned(reckoner, way, length), measured.peak(way, length)
        assert told == pytest.approx(found, rel=0.05), (way, length)


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("t5", marks=pytest.mark.slow)])
def test_few_blocks_tell_what_all_of_them_take(family) -> None:
    config = with_depth(ARCHITECTURES[family]().config, 2)
    task = Seq2SeqConfig() if family == "t5" else None
    few, all_of_them = (reckoner_of(_deeper(config, 5), "nf4", task) for _ in range(2))
    all_of_them._depth = 5
    found, known = few.count(2, 64, "recompute"), all_of_them.count(2, 64, "recompute")
    for name, value in known.peak.items():
        assert found.peak[name] == pytest.approx(value, rel=0.1, abs=2e4), name
    assert found.flops == pytest.approx(known.flops, rel=0.02)


def _deeper(config: object, depth: int) -> transformers.PreTrainedConfig:
    fields = config.to_dict()  # type: ignore[attr-defined]
    for name in ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"):
        if name in fields:
            fields[name] = depth
    fields.pop("layer_types", None)
    made: transformers.PreTrainedConfig = type(config)(**fields)
    return made


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("double_quant", [True, False])
def test_packed_weight_without_values_has_the_form_of_one_with_them(kind, double_quant) -> None:
    for shape in ((9, 41), (3, 64, 32)):
        packed, packing = pack(torch.randn(shape), kind, double_quant=double_quant)
        empty, other = empty_packed(
            torch.Size(shape), kind, torch.float32, double_quant=double_quant
        )
        assert (empty.shape, empty.dtype) == (packed.shape, packed.dtype)
        assert [(s.shape, s.dtype) for s in other.scales] == [
            (s.shape, s.dtype) for s in packing.scales
        ]
        assert (other.form, other.dtype) == (packing.form, packing.dtype)


def test_plan_needs_the_config_alone_and_counts_all_of_the_model(folder) -> None:
    quick = ("base.quantize=nf4", "train.gradient_checkpointing=false")
    plan = a_plan(folder, "24GB", *quick, "train.batch_size=1")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
    assert plan.num_parameters == sum(p.numel() for p in model.parameters())
    assert plan.fits
    assert plan.adapter_bytes == 4 * plan.num_trained
    figures = plan.as_json()
    names = {"peak_bytes", "by_category", "fits", "longest_row", "most_rows", "step_flops"}
    assert names | {"adapter_bytes", "change"} <= figures.keys()
    assert figures["peak_bytes"] == sum(figures["by_category"].values())
    floor = 4 * (plan.num_parameters - 65.5e6) * plan.length  # forward and the input's gradient
    assert floor < plan.chosen.step_flops < 2.2 * floor


@pytest.mark.slow
def test_longest_row_fits_and_a_longer_one_does_not(folder) -> None:
    asked = ("base.quantize=nf4", "train.batch_size=1", "train.gradient_checkpointing=false")
    longest = a_plan(folder, "8GB", *asked).chosen.longest_row
    assert 1024 < longest < 131072
    for length, fits in ((longest, True), (int(1.1 * longest), False)):
        plan = a_plan(folder, "8GB", *asked, f"data.max_length={length}")
        assert plan.fits == fits


@pytest.mark.slow
def test_change_that_is_told_makes_it_fit(folder) -> None:
    asked = ("train.batch_size=1", "train.gradient_checkpointing=true", "data.max_length=256")
    plan = a_plan(folder, "2.5GB", *asked)
    assert not plan.fits
    assert "base.quantize=nf4" in plan.change
    changes = [part for part in plan.change.split() if part != "--set"]
    assert a_plan(folder, "2.5GB", *asked, *changes).fits


def test_recipe_is_planned_with_its_data(folder, tmp_path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"text": "a word and more " * 10}) + "\n\n", encoding="utf-8")
    given = {"base": {"model": str(folder), "quantize": "nf4"}, "data": {"train": str(data)}}
    recipe = from_dict(
        Recipe, {**given, "train": {"epochs": 2.0, "gradient_checkpointing": False}}, "test"
    )
    plan = plan_run(recipe, memory=24 * GB, measure=False)
    assert plan.num_rows == 1
    assert plan.num_tokens is not None
    assert 30 < plan.num_tokens < 60
    assert plan.run_tokens == 2 * plan.num_tokens


def test_a_batch_of_short_rows_is_planned(folder, tmp_path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"text": "a word and more"}) + "\n", encoding="utf-8")
    given = {"base": {"model": str(folder)}, "data": {"train": str(data), "max_length": 64}}
    recipe = from_dict(Recipe, {**given, "train": {"batch_size": 4}}, "test")
    plan = plan_run(recipe, memory=24 * GB, measure=False)
    assert plan.fits
    found = plan.as_json()["by_category"]
    assert found["adapters"] == pytest.approx(4 * plan.num_trained, rel=0.02)
    assert found["weights"] >= 2 * plan.num_parameters


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * GB), ("7.5GiB", int(7.5 * 2**30)), ("12", 12 * GB), ("512 mb", 512 * 10**6)],
)
def test_sizes_are_read(text, size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8Q", "-1GB", "0", "GB", "8B", "1e3", "eight"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_model_without_a_config_is_refused(tmp_path) -> None:
    with pytest.raises(BaseError):
        plan_run(str(tmp_path), memory="8GB")


def test_command_prints_a_verdict_or_json(folder, capsys) -> None:
    asked = ["plan", str(folder), "--memory", "24GB", "--set", "base.quantize=nf4"]
    asked += ["--set", "train.gradient_checkpointing=false"]
    assert run([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert run(["plan", str(folder / "none.yaml")]) == 2
    assert run([*asked[:3], "8Q"]) == 2
    assert "8Q" in capsys.readouterr().err
