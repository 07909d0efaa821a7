"""A plan is what the run then takes, and says what to change where that is too much."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from peftkit import LoRA, Recipe, plan_run, save_adapter
from peftkit.config.schema import from_dict
from peftkit.errors import AdapterError, BaseError
from peftkit.execution.environment import PROCESS_BYTES, gpu_of_size
from peftkit.planning import plan as planner
from peftkit.planning.memory import MemoryEstimator, Strategy
from peftkit.planning.plan import Plan
from peftkit.planning.resolve import config_of
from peftkit.run import prepare
from peftkit_cli.app import run
from tests.helpers.adapters import base_folder, model_with_adapter
from tests.helpers.families import llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config of a model of 1.3B parameters, and nothing else."""
    found = tmp_path_factory.mktemp("large")
    config = llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=32000)
    config.max_position_embeddings = 1 << 18
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def short(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for 2,048 tokens: no plan counts longer rows, which takes seconds."""
    found = tmp_path_factory.mktemp("short")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 2048
    config.save_pretrained(found)
    return found


def a_plan(folder: Path, memory: str, *overrides: str) -> Plan:
    return plan_run(str(folder), memory=memory, overrides=overrides, measure=False)


@pytest.mark.smoke
def test_plan_needs_the_config_alone_and_counts_all_of_the_model(short):
    quick = ("base.quantize=nf4", "train.gradient_checkpointing=false")
    plan = a_plan(short, "24GB", *quick, "train.batch_size=1")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(short)
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


def test_quantize_for_counts_a_copy_of_each_adapted_weight(tmp_path):
    folder = Path(base_folder("llama", tmp_path))
    quick = ("data.max_length=64", "method.type=lora", "method.targets=[q,down]")
    plain, aware = (
        a_plan(folder, "24GB", *quick, *more).as_json()["by_category"]
        for more in ((), ("train.quantize_for=int4_32",))
    )
    config = transformers.AutoConfig.from_pretrained(folder)
    values = config.hidden_size * (config.hidden_size + config.intermediate_size)
    assert aware["weights"] - plain["weights"] == 2 * config.num_hidden_layers * values
    assert {**aware, "weights": 0} == {**plain, "weights": 0}


class Clock:
    """A processor that others have for the first products: each lasts 30 times as long."""

    def __init__(self, busy: int) -> None:
        self.seconds, self.used, self.busy = 0.0, 0.0, busy

    def perf_counter(self) -> float:
        return self.seconds

    def process_time(self) -> float:
        return self.used

    def __matmul__(self, other: Clock) -> None:
        self.seconds += 0.03 if self.busy > 0 else 0.001
        self.used += 0.001 * torch.get_num_threads()
        self.busy -= 1


@pytest.mark.smoke
@pytest.mark.parametrize("busy", [0, 10_000])
def test_other_programs_change_the_rate_of_now_alone(monkeypatch, busy):
    clock = Clock(busy)
    monkeypatch.setattr(planner, "time", clock)
    monkeypatch.setattr(planner, "local_gpu", lambda: None)
    monkeypatch.setattr(torch, "ones", lambda *sizes, **more: clock)
    idle, now = planner.measured_rates(torch.float32)
    assert idle == pytest.approx(2 * 512**3 / 0.001)
    assert now == pytest.approx(idle / 30 if busy else idle)
    assert clock.seconds < 2 * planner.MEASURE_SECONDS


@pytest.mark.parametrize("now", [61.0, 700.0])
def test_a_time_has_a_range_on_a_busy_machine(tmp_path, now):
    plan = a_plan(Path(base_folder("llama", tmp_path)), "4GB", "train.gradient_checkpointing=false")
    text = replace(plan, seconds_here=60.0, seconds_now=now).facts()["a batch here"]
    idle = "about 1 min once loaded"
    assert text == ("about 1 min idle, 10 min at the current load" if now > 100 else idle)


@pytest.mark.slow
def test_the_time_of_a_small_run_is_not_told_to_the_tenth(folder):
    plan = replace(a_plan(folder, "24GB"), num_rows=9, num_tokens=900, run_tokens=900)
    short, long = (
        replace(plan, seconds_on={"H100": seconds}).facts()["the run on H100"]
        for seconds in (0.1, 90.0)
    )
    assert short.startswith("a few seconds")
    assert "40 %" in long


def test_longest_row_fits_and_a_longer_one_does_not(folder):
    def planned(length: int) -> Strategy:
        given = {
            "base": {"model": str(folder), "quantize": "nf4", "dtype": "bf16"},
            "data": {"train": "rows.jsonl", "max_length": length},
            "train": {"batch_size": 1, "gradient_checkpointing": False, "output_dir": "run"},
        }
        recipe = from_dict(Recipe, given, "test")
        costs = MemoryEstimator(recipe, config_of(recipe), gpu_of_size(4 * 10**9))
        (strategy,) = costs.placed("device")
        return strategy

    longest = planned(1024).longest_row
    assert 1024 < longest < 131072
    # up to 15 % too short: at the length that is counted the chunk of logits is not full yet
    assert planned(longest).fits
    assert not planned(int(1.2 * longest)).fits


@pytest.mark.slow
def test_change_that_is_told_makes_it_fit(folder):
    asked = ("train.batch_size=1", "train.gradient_checkpointing=true", "data.max_length=256")
    plan = a_plan(folder, "2.5GB", *asked)
    assert not plan.fits
    assert "base.quantize=nf4" in plan.change
    changes = [part for part in plan.change.split() if part != "--set"]
    assert a_plan(folder, "2.5GB", *asked, *changes).fits


@pytest.mark.slow
def test_base_in_the_way_of_a_long_row_stays_and_streaming_is_named(folder):
    asked = ("base.quantize=nf4", "train.gradient_checkpointing=true", "train.batch_size=1")
    asked += ("data.max_length=7000",)
    memory = "2.4GB"  # the base takes less than half, the longest row more than the rest
    plan = a_plan(folder, memory, *asked)
    assert {way.placement for way in plan.ways} == {"device"}
    assert plan.change == "--set base.placement=stream"
    assert a_plan(folder, memory, *asked, "base.placement=stream").fits


@pytest.mark.slow
def test_base_that_does_not_fit_is_planned_streamed(folder):
    asked = ("base.quantize=nf4", "train.gradient_checkpointing=true", "train.batch_size=1")
    asked += ("data.max_length=128",)
    plan = a_plan(folder, "1.2GB", *asked)
    assert plan.fits
    assert [way.placement for way in plan.ways] == ["device"] * 2 + ["stream"] * 2
    device, _, streamed, _ = plan.ways
    assert plan.chosen == streamed
    assert not device.fits
    assert streamed.host_bytes > device.peak_bytes - streamed.peak_bytes > 0
    blocks = streamed.host_bytes / 16  # each comes twice; two at each end stay in between
    assert streamed.moved_bytes == pytest.approx(28 * blocks, rel=1e-3)
    assert 0 < streamed.compute_bound_tokens < 100_000
    kept = a_plan(folder, "1.2GB", *asked, "base.placement=device")
    assert not kept.fits
    assert kept.change == "--set base.placement=stream"
    slow = plan_run(str(folder), memory="1.2GB", overrides=asked, link=0.001, measure=False)
    assert min(slow.seconds_on.values()) > streamed.moved_bytes / 1.1e6
    assert [share.cards for share in plan.cards] == [1, 2, 4, 8]
    one, two, four, eight = (share.by_category["weights"] for share in plan.cards)
    assert one > two > four > eight
    assert plan.cards[0].wire_bytes == 0 < plan.cards[1].wire_bytes < plan.cards[3].wire_bytes


@pytest.mark.smoke
def test_recipe_is_planned_with_its_data(model_folder, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"text": "a word and more " * 3}) + "\n\n", encoding="utf-8")
    given = {"base": {"model": str(model_folder)}, "data": {"train": str(data), "max_length": 64}}
    train = {"epochs": 2.0, "gradient_checkpointing": False, "batch_size": 4}
    recipe = from_dict(Recipe, {**given, "train": train}, "test")
    plan = plan_run(recipe, memory="24GB")
    assert plan.num_rows == 1
    rows = prepare(recipe).train
    assert plan.num_tokens == sum(len(row.input_ids) for row in rows)
    assert plan.length == plan.num_tokens < 64
    assert plan.run_tokens == 2 * plan.num_tokens
    assert plan.fits
    found = plan.as_json()["by_category"]
    assert found["adapters"] == pytest.approx(4 * plan.num_trained, rel=0.02)
    assert found["weights"] >= 2 * plan.num_parameters


def test_a_continued_adapter_is_planned_and_not_a_new_one(tmp_path):
    _, adapter = model_with_adapter("llama", LoRA(rank=12, targets=("all-linear",)))
    folder = save_adapter(adapter, tmp_path / "adapter")
    base = base_folder("llama", tmp_path / "base")
    plan = plan_run(base, overrides=(f"method.start_from={folder}",), measure=False)
    assert plan.num_trained == sum(p.numel() for p in adapter.parameters())
    with pytest.raises(AdapterError, match="no adapter folder"):
        plan_run(base, overrides=(f"method.start_from={tmp_path}/other",), measure=False)


@pytest.mark.parametrize("packing", [False, True])
def test_steps_in_place_of_epochs_are_planned(tmp_path, packing):
    data = tmp_path / "train.jsonl"
    data.write_text((json.dumps({"text": "a word " * 10}) + "\n") * 100, encoding="utf-8")
    given = {"base": {"model": "x"}, "train": {"max_steps": 3, "batch_size": 4}}
    given |= {"data": {"train": str(data), "max_length": 64, "packing": packing}}
    anchored = {**given, "task": {"type": "causal_lm", "anchor": 1.0}}
    plain, with_anchor = (from_dict(Recipe, each, "test") for each in (given, anchored))
    num_rows, num_tokens, _ = planner._data(plain)
    tokens = 3 * 4 * (64 if packing else num_tokens / 100)
    assert planner._run_tokens(plain, num_rows, num_tokens, 64) == tokens
    more = planner._run_tokens(with_anchor, num_rows, num_tokens, 64)
    assert more == tokens + 3 * planner.ANCHOR_TOKENS  # of short rows: an answer a step


@pytest.mark.slow
def test_what_is_told_of_a_tight_run_agrees_with_its_table(folder, capsys):
    asked = ["plan", str(folder), "--memory", "3GB", "--set", "data.max_length=1024"]
    asked += ["--set", "base.quantize=nf4", "--set", "train.gradient_checkpointing=true"]
    asked += ["--set", "train.batch_size=64", "--set", "train.tokens_per_batch=65536"]
    assert run(asked) == 0
    told = capsys.readouterr().out
    assert " of 64 rows" in told
    assert "It fits" in told
    assert "activations are recomputed" in told


@pytest.mark.slow
def test_the_process_itself_is_part_of_what_is_told(folder):
    plan = plan_run(str(folder), overrides=("data.max_length=16",), measure=False)
    assert not plan.on_gpu
    assert plan.chosen.by_category["process"] == PROCESS_BYTES["cpu"]
    assert plan.chosen.peak_bytes == sum(plan.chosen.by_category.values())


@pytest.mark.smoke
def test_model_without_a_config_is_refused(tmp_path):
    with pytest.raises(BaseError):
        plan_run(str(tmp_path), memory="8GB")


def test_command_prints_a_verdict_or_json(short, capsys):
    asked = ["plan", str(short), "--memory", "24GB", "--set", "base.quantize=nf4"]
    asked += ["--set", "train.gradient_checkpointing=false"]
    assert run([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert {"placement", "moved_bytes", "compute_bound_tokens"} <= found.keys()
    assert {"wire_bytes", "compute_bound_tokens", "peak_bytes"} <= found["cards"][1].keys()
    assert found["answers"].keys() == {"1024", "4096", "16384"}
    assert run([*asked, "--link", "25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("It fits" in line for line in lines)
    assert "main" not in lines[1]
    assert run([*asked[:-2], "--set", "train.gradient_checkpointing=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "main" in lines[1]
    assert run(["plan", str(short / "none.yaml")]) == 2
    assert run([*asked[:3], "8Q"]) == 2
    assert "8Q" in capsys.readouterr().err


def test_answers_beside_a_base_take_no_more_than_is_free(short):
    config = transformers.AutoConfig.from_pretrained(short)
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    kept = 2 * 2 * config.num_hidden_layers * heads * size  # keys and values, 16 bits
    base = ("base.quantize=nf4", "base.dtype=bf16", "base.placement=device")
    asked = (*base, "train.gradient_checkpointing=false")  # one way, whose rows are short
    plan = a_plan(short, "24GB", *asked)
    weights = next(s for s in plan.ways if s.placement == "device").by_category["weights"]
    free = 0.95 * 24e9 - PROCESS_BYTES["cuda"] - weights
    for length, number in plan.answers.items():
        assert 0.7 * free < number * length * kept < free
    smaller = a_plan(short, "8GB", *asked)
    assert 0 < smaller.answers[1024] < plan.answers[1024]
