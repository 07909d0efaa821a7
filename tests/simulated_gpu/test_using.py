"""What is done with a trained adapter on a card: generating, measuring, the bank, merging."""

import gc
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import transformers

from peftkit.base.load import load_base
from peftkit.errors import BaseError, RunError
from peftkit.evaluation.evaluate import evaluate
from peftkit.events import Event, Notice, StepDone
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.inference.bank import open_bank
from peftkit.inference.engine import Request
from peftkit.inference.generate import generate
from peftkit.inference.generate import stream as stream_ids
from peftkit.inference.sampling import Sampling
from peftkit.merging.merge import merge
from peftkit.methods.lora_linear import LoRALinear
from peftkit.run import run as run_recipe
from peftkit_server.generation import Generation, Output
from peftkit_server.worker import Worker
from tests.simulated_gpu.recipes import recipe_for
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card

PROMPTS = ["what is 3?", "what is the fox doing over there?", "1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that has learnt something, trained on a CPU. Do not write into it."""
    folder = tmp_path_factory.mktemp("trained")
    asked = recipe_for("causal_lm", folder)
    return Path(run_recipe(asked).checkpoint).parents[1]


def opened(folder: Path, **how: Any) -> Any:
    return open_adapter(folder, **how)


@pytest.mark.smoke
def test_generating_gives_the_same_words(trained):
    def answers() -> tuple[list[str], list[str]]:
        found = opened(trained).base
        greedy = generate(found.model, found.tokenizer, PROMPTS, max_new_tokens=6)
        sampled = generate(
            found.model, found.tokenizer, PROMPTS, max_new_tokens=6, temperature=1.0, seed=3
        )
        return greedy, sampled

    expected = answers()
    with simulated() as card:
        assert answers() == expected
        assert card.launches > 1000


def test_streaming_from_a_thread_gives_the_same_words(trained):
    def words() -> str:
        base = opened(trained).base
        return "".join(stream_ids(base.model, base.tokenizer, [7, 8, 9], max_new_tokens=6))

    expected = words()
    with simulated():
        assert words() == expected


@pytest.mark.parametrize("quantize", ["nf4"])
def test_measuring_gives_the_same_figures(trained, quantize):
    def figures() -> dict[str, float]:
        found = opened(trained, quantize=quantize)
        return evaluate(found.base, trained.parent / "rows.jsonl", task=found.task)

    expected = figures()
    with simulated():
        assert figures() == pytest.approx(expected, abs=1e-4)


def test_the_bank_serves_each_row_its_adapter(trained):
    def answers() -> list[str]:
        bank = open_bank({"a": trained, "b": trained / "checkpoints" / "step-3"})
        return bank.generate(PROMPTS, ["a", None, "b"], max_new_tokens=6)

    expected = answers()
    with simulated():
        assert answers() == expected


@pytest.mark.parametrize(("dtype", "room"), [("fp32", 1.3), ("bf16", 1e9)])
def test_merging_verifies_in_float32_where_there_is_room(
    trained, tmp_path, dtype, room, monkeypatch
):
    monkeypatch.setattr("peftkit.merging.verify.FLOAT32_ROOM", room)
    with simulated():
        merged = merge(trained, tmp_path / "out", dtype=dtype)
    assert merged.agreement is not None
    assert merged.effect is not None
    assert merged.agreement.max_difference < 0.5 * merged.effect.max_difference
    if dtype == "fp32" and room < 2:
        assert merged.agreement.max_difference < 1e-4


def test_small_cards_verify(trained, tmp_path, monkeypatch):
    right = LoRALinear.merged_weight
    monkeypatch.setattr(LoRALinear, "merged_weight", lambda *args: 2 * args[1] - right(*args))
    monkeypatch.setattr("peftkit.merging.verify.FLOAT32_ROOM", 1e9)
    with simulated(), pytest.raises(RunError, match="does not match base and adapter"):
        merge(trained, tmp_path / "out", dtype="bf16")


def test_a_merge_too_large_for_the_card_uses_the_cpu(trained, tmp_path):
    told: list[str] = []
    with simulated(Card(memory=100_000)) as card:
        merged = merge(trained, tmp_path / "out", on_event=lambda event: told.append(str(event)))
        assert card.peak < 50_000
    assert merged.agreement is not None
    assert merged.agreement.max_difference < 1e-4
    assert any("base runs on the CPU" in text for text in told)


def test_a_quantised_base_is_merged_on_the_card(trained, tmp_path):
    found = tmp_path / "adapter"
    asked = recipe_for("causal_lm", tmp_path)
    asked = asked.model_copy(
        update={
            "base": asked.base.model_copy(update={"quantize": "nf4"}),
            "train": asked.train.model_copy(update={"output_dir": found}),
        }
    )
    with simulated():
        run_recipe(asked)
        merged = merge(found, tmp_path / "merged", from_quantized=True)
    assert merged.agreement is not None
    assert torch.isfinite(torch.tensor(merged.agreement.max_difference))


def test_a_merge_of_two_large_models_runs_on_the_cpu(trained, tmp_path):
    adapter = open_adapter(trained, quantize="nf4", device="cpu")
    origin = adapter.file.provenance
    loading = {**origin.loading, "quantize": "nf4"}
    save_adapter(adapter.adapter, tmp_path / "nf4", replace(origin, loading=loading))
    packed = sum(t.nbytes for t in adapter.base.model.parameters())
    events: list[Event] = []
    with simulated(Card(memory=int(1.3 * packed))) as card:
        merged = merge(
            tmp_path / "nf4", tmp_path / "out", from_quantized=True, on_event=events.append
        )
        assert card.peak == 0
    assert merged.agreement is not None
    assert merged.agreement.max_difference < 1e-4
    (notice,) = (e.text for e in events if isinstance(e, Notice) and "CPU" in e.text)
    assert re.search(r"take [\d.]+ kB together; the GPU has [\d.]+ kB free", notice)


@pytest.mark.parametrize("kind", ["none", pytest.param("nf4", marks=pytest.mark.slow)])
def test_a_base_too_large_for_the_card_is_one_error(model_folder, kind, monkeypatch):
    # transformers' reserves memory first, and asks for less than none on a card so small
    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", lambda *asked: 0)
    with simulated() as card:
        load_base(str(model_folder), quantize=kind, placement="device")  # what a first one leaves
        gc.collect()
        before, card.memory = card.allocated, card.allocated + 60_000
        with pytest.raises(BaseError, match="does not fit into memory") as error:
            load_base(str(model_folder), quantize=kind, placement="device")
        assert "out of memory" in error.value.found
        assert "base.placement: stream" in error.value.fix
        gc.collect()
        assert card.allocated <= before + 1024  # a table of 256 values may stay


END = "<end>"


def test_a_served_base_trains_between_answers(trained, tmp_path):
    def losses_and_answers(folder: Path, *, asks: bool) -> tuple[list[float], list[str]]:
        bank = open_bank({"a": trained})
        worker, losses, texts = Worker(bank), list[float](), SimpleQueue[str]()
        done = threading.Event()
        folder.mkdir()
        asked = recipe_for("causal_lm", folder)
        ids = [int(token) for token in bank.base.tokenizer(PROMPTS[1])["input_ids"]]

        def tell(piece: Output | Exception) -> None:
            texts.put(piece.text if isinstance(piece, Output) else f"error: {piece}")
            if not isinstance(piece, Output) or piece.reason:
                texts.put(END)

        def train(give_way: Callable[[], None]) -> None:
            def listen(event: Event) -> None:
                if isinstance(event, StepDone):
                    losses.append(event.loss)
                    if asks:
                        worker.submit([Generation(Request(ids, Sampling(4), adapter="a"), tell)])
                    give_way()

            try:
                run_recipe(asked, base=bank.base, on_event=listen)
            finally:
                done.set()

        worker.queue(train)
        worker.start()
        assert done.wait(60)
        if not asks:
            worker.submit([Generation(Request(ids, Sampling(4), adapter="a"), tell)])
        answers = ["".join(iter(texts.get, END)) for _ in range(3 if asks else 1)]
        worker.stop()
        return losses, answers

    with simulated() as card:
        alone, expected = losses_and_answers(tmp_path / "alone", asks=False)
        assert card.launches > 1000
        beside, answers = losses_and_answers(tmp_path / "beside", asks=True)
    assert beside == alone
    assert answers == expected * 3


def test_a_streamed_base_completes_as_on_a_cpu_and_its_run_reports_no_graphs(tmp_path):
    recipe = recipe_for("causal_lm", tmp_path)
    model = recipe.base.model
    recipe = recipe.model_copy(
        update={
            "base": recipe.base.model_copy(update={"quantize": "nf4", "placement": "stream"}),
            "train": recipe.train.model_copy(update={"max_steps": 1, "eval_generate": 1}),
        }
    )
    events: list[Event] = []
    found = load_base(model, dtype="fp32", quantize="nf4", device="cpu")
    expected = generate(found.model, found.tokenizer, PROMPTS[:2], max_new_tokens=3)
    with simulated():
        found = load_base(model, dtype="fp32", quantize="nf4", placement="stream", device="cuda")
        assert generate(found.model, found.tokenizer, PROMPTS[:2], max_new_tokens=3) == expected
        run_recipe(recipe, on_event=events.append)
    texts = [event.text for event in events if isinstance(event, Notice)]
    (text,) = [text for text in texts if text.startswith("Decoding runs without CUDA graphs.")]
    assert "Its blocks wait for other processes or host memory" in text
