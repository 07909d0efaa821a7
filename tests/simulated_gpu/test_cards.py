"""Serving and GRPO on cards of 8 to 24 GB, in the proportions of an 8B in nf4.

A small model's card is as many times larger than its weights as the real card is than 5.6 GB, and
the process takes as much of it as CUDA's context does. So plans and limits meet what they meet
there; the simulated card refuses what it does not hold.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from peftkit.base.load import load_base
from peftkit.events import Event, Notice, StepDone
from peftkit.execution import environment
from peftkit.inference.bank import open_bank
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from tests.helpers.bank import write_adapter
from tests.helpers.folders import write_rows
from tests.helpers.worker import Submitted, run_jobs
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card

WEIGHTS = 5_600_000_000
"""Bytes of an 8B in nf4 with its embeddings in 16 bits."""
CARDS = (8, 12, 16, 24)
ASKED = [[5 + (7 * n + k) % 370 for k in range(120 + n)] for n in range(9)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model whose weights are large beside what a token takes, as an 8B's are."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=384,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def weights(base: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of the base on a card; a process takes its share of them."""
    # transformers' reserves memory first, and asks for less than none on a card so small
    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", lambda *asked: 0)
    with simulated() as card:
        loaded = load_base(str(base), dtype="fp32")
        found = card.allocated
        assert loaded.device.type == "cuda"
    context = environment.PROCESS_BYTES["cuda"] * found // WEIGHTS
    monkeypatch.setitem(environment.PROCESS_BYTES, "cuda", context)
    return found


def card_of(gigabytes: int, weights: int) -> Card:
    """Return a card that is as large beside these weights as one of so many GB beside an 8B."""
    return Card(memory=gigabytes * 2**30 * weights // WEIGHTS)


def served(adapter: Path) -> list[str]:
    """Return the answers to prompts that all wait already, with the adapter and without."""
    bank = open_bank({"a": adapter})
    asked = [
        Submitted("a" if n % 2 else None, one, n, max_new_tokens=12, temperature=1.0)
        for n, one in enumerate(ASKED)
    ]
    answers, _ = run_jobs(bank, asked)
    return [answer.text for answer in answers]


@pytest.mark.parametrize("cards", [CARDS[:1], pytest.param(CARDS[1:], marks=pytest.mark.slow)])
def test_servers_use_any(cards, base, weights, tmp_path):
    loaded = load_base(str(base), dtype="fp32", device="cpu")
    adapter = write_adapter(loaded.model, LoRA(rank=4), tmp_path / "a", 0, base=str(base))
    with simulated() as card:
        expected, peak = served(adapter), card.peak
    assert len(set(expected)) == len(ASKED)
    for gigabytes in cards:
        with simulated(card_of(gigabytes, weights)) as card:
            assert served(adapter) == expected, gigabytes
            assert card.peak <= card.memory
            assert (card.peak < 0.9 * peak) == (gigabytes == 8), "fewer at a time, or as many"


def learnt(
    folder: Path, base: Path, num_steps: int = 3, after_step: Callable[[], object] = bool
) -> tuple[list[float], list[str]]:
    """Return the losses and rewards of some steps of GRPO, and the notices."""
    figures: list[float] = []
    notices: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            after_step()
            figures.extend((event.loss, event.figures["reward"]))
        elif isinstance(event, Notice):
            notices.append(event.text)

    recipe = Recipe(
        task={
            "type": "grpo",
            "rewards": [{"use": "regex", "pattern": "[aeiou].*[aeiou]"}],
            "answers": 4,
            "max_new_tokens": 12,
        },
        base={"model": str(base), "dtype": "fp32"},
        method={"type": "lora", "rank": 3, "targets": ["q", "v"]},
        data={"train": str(folder / "rows.jsonl"), "max_length": 64},
        train={
            "output_dir": folder / "out",
            "max_steps": num_steps,
            "batch_size": 2,
            "learning_rate": 0.02,
            "compile": False,
        },
    )
    run_recipe(recipe, overwrite=True, on_event=listen)
    return figures, notices


@pytest.mark.parametrize(
    "gigabytes", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (12, 16, 24))]
)
def test_grpo_is_equal_on_all_cards(gigabytes, base, weights, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"what is {n}?"} for n in range(8)])
    expected, _ = learnt(tmp_path, base)
    with simulated(card_of(gigabytes, weights)) as card:
        figures, notices = learnt(tmp_path, base)
        assert card.peak <= card.memory
    assert figures == pytest.approx(expected, abs=1e-3)
    assert any("too little memory" in notice for notice in notices) == (gigabytes == 8)


@pytest.mark.slow
def test_grpo_leaves_no_cache_on_the_card(base, weights, tmp_path, monkeypatch):
    """20 steps without a garbage collection: each opens an engine, whose cache was 256 KiB more."""
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"what is {n}?"} for n in range(8)])
    allocated: list[int] = []
    with simulated(card_of(24, weights)) as card:
        gc.collect()
        gc.disable()
        try:
            _, notices = learnt(tmp_path, base, 20, lambda: allocated.append(card.allocated))
        finally:
            gc.enable()
    print(allocated, notices)
    assert len(set(allocated[4:])) == 1, allocated  # the first steps allocate buffers
    assert not notices
