"""`auto` keeps the base elsewhere exactly where the count says that the device does not hold it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks import shapes
from peftkit import run as story
from peftkit.config.schema import from_dict
from peftkit.errors import RunError
from peftkit.events import Event, Notice
from peftkit.execution import environment
from peftkit.execution.environment import Environment, gpu_of_size
from peftkit.methods.lora import LoRA
from peftkit.planning import memory as planning
from peftkit.planning import resolve
from peftkit.planning.memory import MemoryEstimator
from peftkit.planning.resolve import config_of, resolve_plan
from peftkit.planning.step_estimator import CountError
from peftkit.recipe import Recipe
from peftkit.settings import BaseConfig
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.families import llama, tiny_tokenizer
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card

GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six blocks that are large beside a step of a few tokens."""
    found = tmp_path_factory.mktemp("blocks")
    config = llama(num_hidden_layers=6, hidden_size=256, intermediate_size=768, vocab_size=400)
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    return found


def asked(folder: Path, out: Path, **sections: dict[str, Any]) -> Recipe:
    rows = out / "rows.jsonl"
    rows.write_text('{"text": "one two three four five"}\n' * 4, encoding="utf-8")
    given: dict[str, dict[str, Any]] = {
        "base": {"model": str(folder), "quantize": "nf4", "dtype": "bf16", "store": "off"},
        "method": {"type": "lora", "rank": 2, "targets": ["q", "v"]},
        "data": {"train": str(rows), "max_length": 32, "packing": False},
        "train": {"output_dir": str(out / "run"), "max_steps": 2, "compile": False},
    }
    whole = {name: {**section, **sections.get(name, {})} for name, section in given.items()}
    return from_dict(Recipe, whole, "test")


def costs_of(recipe: Recipe, *, on_gpu: bool = True) -> MemoryEstimator:
    return MemoryEstimator(recipe, config_of(recipe), Environment("cuda" if on_gpu else "cpu", GB))


def on_a_card(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr(resolve, "free_for_training", lambda *_: Environment("cuda", memory))


@pytest.mark.smoke
def test_base_streams_exactly_if_one_row_does_not_fit(folder, tmp_path, monkeypatch):
    recipe = asked(folder, tmp_path)
    needed = costs_of(recipe).smallest().peak_bytes
    for memory, placement in ((needed, "device"), (needed - 1, "stream")):
        told: list[Event] = []
        on_a_card(monkeypatch, memory)
        assert resolve_plan(recipe, told.append).placement == placement
        assert len(told) == (placement == "stream")
    assert "base.placement: auto" in str(told[0])


def test_where_the_weights_alone_decide_no_step_is_counted(folder, tmp_path, monkeypatch):
    recipe = asked(folder, tmp_path)
    costs = costs_of(recipe)
    weights = costs.steps.weights

    def never(*given: object) -> int:
        raise AssertionError("it is plain")

    monkeypatch.setattr(planning, "smallest_step", never)
    for memory, placement in ((2 * weights, "device"), (weights - 1, "stream")):
        on_a_card(monkeypatch, memory)
        assert resolve_plan(recipe, lambda event: None).placement == placement
        costs.environment = Environment("cuda", memory)
        planned = [strategy.placement for strategy in costs.strategies()]
        assert ("stream" in planned) == (placement == "stream")
    on_a_card(monkeypatch, 2 * weights - 1)
    with pytest.raises(AssertionError):
        resolve_plan(recipe, lambda event: None)


def test_weights_decide_if_a_step_cannot_be_counted(folder, tmp_path, monkeypatch):
    recipe = asked(folder, tmp_path)
    weights = costs_of(recipe).steps.weights

    def fail(*given: object) -> None:
        raise CountError("it cannot be counted.")

    monkeypatch.setattr(MemoryEstimator, "smallest", fail)
    for memory, placement in ((1.3 * weights, "device"), (1.2 * weights, "stream")):
        events: list[Event] = []
        on_a_card(monkeypatch, int(memory))
        assert resolve_plan(recipe, events.append).placement == placement
        assert "cannot be counted" in str(events[0])


def test_an_8b_on_8_gb_finds_by_itself_for_which_rows_it_is_streamed(tmp_path, monkeypatch):
    config = shapes.SHAPES["llama-3.1-8b"].make_config()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    on_a_card(monkeypatch, gpu_of_size(8 * GB).usable)
    for length, placement in ((512, "device"), (4096, "stream")):
        given = asked(tmp_path, tmp_path, data={"max_length": length}, base={"dtype": "bf16"})
        recipe = given.model_copy(update={"method": LoRA(rank=16)})
        assert resolve_plan(recipe, lambda event: None).placement == placement


class Ranks:
    """Two processes that see the same memory."""

    def __init__(self, device: torch.device) -> None:
        """Join nobody: what each would say is the same."""

    def max(self, value: int) -> int:
        """Return the largest value of all."""
        return value


def test_a_base_is_sharded_as_far_as_memory_requires(folder, tmp_path, monkeypatch):
    recipe = asked(folder, tmp_path, base={"quantize": "none", "dtype": "bf16"})
    two = Environment("cuda", GB, world_size=2)
    costs = MemoryEstimator(recipe, costs_of(recipe).config, two)
    whole, spread = (costs.smallest(shard=shard).peak_bytes for shard in ("none", "base"))
    monkeypatch.setattr(resolve, "World", Ranks)
    for memory, shard in ((whole, "none"), (spread, "base"), (spread - 1, "offload")):
        here = replace(two, memory=memory)
        monkeypatch.setattr(resolve, "free_for_training", lambda *_: here)  # noqa: B023
        told: list[Event] = []
        plan = resolve_plan(recipe, told.append)
        assert (plan.shard, plan.placement, plan.num_processes) == (shard, "device", 2)
        assert len(told) == (shard != "none")


def test_what_may_not_be_streamed_stays_and_is_told(folder, tmp_path, monkeypatch):
    on_a_card(monkeypatch, 1000)
    for recipe in (
        asked(folder, tmp_path, base={"quantize": "none"}),
        asked(folder, tmp_path, train={"gradient_checkpointing": False}),
    ):
        told: list[Event] = []
        assert resolve_plan(recipe, told.append).placement == "device"
        assert "too little memory" in str(told[0])
    for placement in ("device", "stream"):
        recipe = asked(folder, tmp_path, base={"placement": placement})
        assert resolve_plan(recipe, told.append).placement == placement
    assert len(told) == 1
    assert BaseConfig(model="x").placement == "auto"


def test_run_on_a_card_that_is_a_hundredth_too_small_streams_and_trains(
    folder, tmp_path, monkeypatch
):
    """The plan and the run count the same share of the memory."""
    monkeypatch.setattr(environment, "WORKSPACES", 0)  # larger than this model
    recipe = asked(folder, tmp_path)
    costs = costs_of(recipe)
    needed, less = costs.smallest().peak_bytes, costs.smallest("stream").peak_bytes
    assert less < 0.7 * needed
    memory = int(0.99 * needed / environment.TRAINING_SHARE)
    told: list[str] = []

    def heard(event: Event) -> None:
        if isinstance(event, Notice):
            told.append(event.text)

    count = planning.smallest_step

    def counted(*given: Any) -> int | None:
        with _disable_current_modes():  # the card's kernels want values
            return count(*given)

    monkeypatch.setattr(planning, "smallest_step", counted)
    card = Card(memory=memory)
    with simulated(card):
        story.run(recipe, on_event=heard)
        assert less / 2 < card.peak < memory
    assert any("streamed" in text and "are free" in text for text in told), told


def test_an_error_names_the_line_that_streams_the_base(folder, tmp_path):
    recipe = asked(folder, tmp_path, base={"placement": "device"}, data={"max_length": 512})
    text = " ".join(["one two three four five"] * 80)
    Path(recipe.data.train).write_text(f'{{"text": "{text}"}}\n' * 4, encoding="utf-8")
    train = recipe.train.model_copy(
        update={"memory": 0.8e-9 * costs_of(recipe).smallest().peak_bytes}
    )
    with simulated(), pytest.raises(RunError) as caught:
        story.run(recipe.model_copy(update={"train": train}))
    assert "add the line `placement: stream` to the section `base:`" in str(caught.value)
    assert "quantise" not in str(caught.value)


def work(recipe: dict[str, Any], memory: int) -> None:
    """Train where the second process alone sees too little memory."""
    own = memory if os.environ["RANK"] == "1" else GB
    resolve.free_for_training = lambda *_: Environment("cpu", own, world_size=2)  # type: ignore[assignment]
    told: list[Event] = []
    story.run(from_dict(Recipe, recipe, "test"), on_event=told.append)
    if os.environ["RANK"] == "1":
        folder = Path(recipe["train"]["output_dir"]).parent
        (folder / "told.txt").write_text("\n".join(map(str, told)), encoding="utf-8")
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, False])
def test_processes_share_a_base_that_one_of_them_cannot_hold(fits, folder, tmp_path):
    recipe = asked(
        folder, tmp_path, base={"dtype": "fp32", "quantize": "none"}, method={"type": "lora"}
    )
    needed = costs_of(recipe, on_gpu=False).smallest().peak_bytes
    given = recipe.model_dump(mode="json")
    given["train"] |= {"shard": "auto"}
    children = start_ranks(work, given, needed if fits else needed - 1)
    assert [exit_code(child) for child in children] == [0, 0]
    told = (tmp_path / "told.txt").read_text(encoding="utf-8")
    assert ("sharded over the processes (train.shard: auto)" in told) == (not fits)
    assert ("The base is sharded over the processes:" in told) == (not fits)
