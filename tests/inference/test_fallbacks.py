"""Each slower path is reported with its cause, cost and remedy; no version loses the engine."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from peftkit.adapter import attach
from peftkit.events import Event, Fallback, Notice
from peftkit.forward import batch_layout
from peftkit.forward.compat import cache_name, missing_arguments, with_all_methods
from peftkit.forward.fused import fused_modules, why_unfused
from peftkit.inference import open_engine
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.open_engine import generation_fallbacks
from peftkit.inference.plain_engine import PlainEngine
from peftkit.kernels import device
from peftkit.methods.lora import LoRA
from peftkit.model.roles import ALL_LINEAR
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.loop import fit
from tests.helpers.families import FAMILIES
from tests.helpers.generation import MODELS
from tests.helpers.padding_free import ROWS, task_on
from tests.helpers.rows_alone import BY_LENGTH, llama4_of_48
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card

longrope = BY_LENGTH["phi3_longrope"]
Tokenizer = PreTrainedTokenizerFast
FAST = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "gpt2", "gpt_neox", "mistral_swa")
"""Architectures for which `CachedEngine` is promised under every version of transformers."""


@pytest.mark.parametrize("name", FAST)
def test_no_installed_version_loses_the_engine(name, tokenizer):
    model: Any = MODELS[name]().eval()
    assert generation_fallbacks(model, tokenizer) == []
    assert isinstance(open_engine.open_engine(model, tokenizer), CachedEngine)


@pytest.mark.parametrize("name", FAST)
def test_no_installed_version_loses_padding_free_batches(name, tokenizer):
    model = MODELS[name]().eval()
    task = task_on(model, tokenizer)
    with task.training(model):
        assert task.layout.why_padded == ""
        assert task.layout.attention is not None


@pytest.mark.parametrize(
    ("name", "unfused"),
    [("llama", ""), ("qwen2", ""), ("mixtral", ""), ("gemma2", "norms of Gemma2RMSNorm")],
)
def test_no_installed_version_loses_the_fused_kernels(name, unfused):
    model = FAMILIES[name]().requires_grad_(False)
    with fused_modules(model):
        why = why_unfused(model)
    assert unfused in why
    assert bool(why) == bool(unfused)
    assert "rotations" in why_unfused(model)  # without fused modules


class Renamed(torch.nn.Module):
    """A model whose library has renamed the argument for its cache once more."""

    def forward(self, input_ids: Any, position_ids: Any, kv_store: Any, logits_to_keep: int) -> Any:
        raise AssertionError("never run")


def test_a_renamed_argument_is_named_as_the_cause(tokenizer, monkeypatch):
    assert cache_name(Renamed()) is None
    missing = missing_arguments(Renamed(), ("position_ids", "cache", "logits_to_keep"))
    assert missing.startswith("transformers ")
    assert missing.endswith(": Renamed.forward has no argument cache")
    model: Any = FAMILIES["llama"]().eval()
    monkeypatch.setattr(type(model), "forward", Renamed.forward)
    monkeypatch.setattr("peftkit.forward.compat._arguments", _uncached)
    (fallback,) = generation_fallbacks(model, tokenizer)
    assert isinstance(open_engine.open_engine(model, tokenizer), PlainEngine)
    assert fallback.path == "Completions are generated batch by batch"
    assert "LlamaForCausalLM.forward has no argument cache, which the engine needs." in str(
        fallback.text
    )


@pytest.mark.covers("peftkit")
def test_a_trial_without_memory_is_reported_and_not_remembered(tokenizer):
    model: Any = FAMILIES["llama"]().eval()
    size = sum(parameter.nbytes for parameter in model.parameters())
    with simulated(Card(memory=size + 4096)) as card:
        model.to("cuda")
        (fallback,) = generation_fallbacks(model, tokenizer)
        card.memory *= 100
        assert generation_fallbacks(model, tokenizer) == []
    assert fallback.path == "The engine for completions could not be tried"
    assert fallback.cause == "Memory ran out for a prompt of 9 tokens."


def _uncached(kind: Any) -> tuple[str, ...]:
    return tuple(kind.forward.__annotations__)


def test_an_abstract_method_of_another_version_raises_only_if_it_is_called():
    import abc

    class Layer(abc.ABC):
        @abc.abstractmethod
        def of_another_version(self) -> int: ...

    layer: Any = with_all_methods(type("Own", (Layer,), {}))()
    with pytest.raises(NotImplementedError, match="Own has no of_another_version"):
        layer.of_another_version()


def notices_of(
    tmp_path: Any, tokenizer: Tokenizer, model: Any, targets: str = ALL_LINEAR, **settings: Any
) -> list[str]:
    events: list[Event] = []
    attach(model, LoRA(rank=2, targets=(targets,)))
    task = CausalLM(model, tokenizer, DataConfig(train="", max_length=32, packing=False))
    config = TrainConfig(output_dir=tmp_path, max_steps=1, batch_size=2, **settings)
    fit(model, task, ROWS[:4], config=config, on_event=events.append)
    return [event.text for event in events if isinstance(event, Notice)]


def test_a_run_reports_padding_at_its_start(tmp_path, tokenizer, monkeypatch):
    why = "The masks have changed."
    monkeypatch.setattr(batch_layout, "why_padded", lambda model, attention, share: why)
    notices = notices_of(tmp_path, tokenizer, FAMILIES["llama"](), compile=False)
    (padding,) = [text for text in notices if text.startswith("Rows are padded. ")]
    assert why in padding
    assert "costs as much as the longest" in padding


@pytest.mark.parametrize(
    ("model", "lengths"), [(longrope, "rows up to 16"), (llama4_of_48, "batches up to 47")]
)
def test_a_run_reports_once_that_batches_with_long_rows_are_padded(
    model, lengths, tmp_path, tokenizer
):
    notices = notices_of(tmp_path, tokenizer, model(), "attention", compile=False)
    (padding,) = [text for text in notices if "padded" in text]
    assert padding.startswith("Batches with long rows are padded. ")
    assert f"isolates documents only in {lengths} tokens." in padding


@pytest.mark.parametrize("make", [longrope, llama4_of_48])
def test_a_batch_beyond_a_models_lengths_is_not_built_without_padding(make, tokenizer, monkeypatch):
    model = make().eval()
    task = task_on(model, tokenizer)
    with task.training(model):
        assert task.layout.attention is not None
        short = task.collate([ROWS[0], ROWS[2]])
        assert short["input_ids"].shape[0] == 1
        monkeypatch.setattr(batch_layout, "unpadded", None)  # calls would fail
        assert task.collate(ROWS)["input_ids"].shape[0] == len(ROWS)


def test_a_run_reports_what_it_does_not_compile(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("peftkit.train.memory.MIN_WORK", {"cpu": 0.0})
    monkeypatch.setattr("peftkit.forward.compiler.cpp_compiler", lambda: None)
    notices = notices_of(tmp_path, tokenizer, FAMILIES["llama"]())
    (compiled,) = [text for text in notices if text.startswith("Blocks are not compiled. ")]
    assert "There is no C++ compiler" in compiled
    assert "apt-get install g++" in compiled


def test_a_plain_run_reports_nothing(tmp_path, tokenizer):
    assert notices_of(tmp_path, tokenizer, FAMILIES["llama"](), compile=False) == []


def test_pageable_copies_are_reported_once(monkeypatch):
    pinning = device.Pinning()
    monkeypatch.setattr(device, "PINNING", pinning)

    def refuse(self: Any) -> Any:
        raise RuntimeError("out of locked memory\nand a stack")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    tensor = torch.ones(3)
    assert device.pinned_copy(tensor) is tensor
    text = pinning.report()
    assert "could not be pinned: out of locked memory" in text
    assert "\n" not in text
    assert pinning.report() == ""


def test_this_machine_is_described_by_the_same_fallbacks(monkeypatch):
    state = torch.get_rng_state()
    monkeypatch.setattr(open_engine, "no_compiler", lambda: "")
    assert open_engine.fallbacks_here() == []
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(open_engine, "missing_arguments", lambda *_: "a renamed argument")
    (engine,) = open_engine.fallbacks_here()
    assert isinstance(engine, Fallback)
    assert "a renamed argument, which the engine needs." in engine.text
