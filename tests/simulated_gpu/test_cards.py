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

ROOT = Path(__file__).parents[2]
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


GRPO: dict[str, Any] = {
    "type": "grpo",
    "rewards": [{"use": "regex", "pattern": "[aeiou].*[aeiou]"}],
    "answers": 4,
    "max_new_tokens": 12,
}


def learnt(
    folder: Path,
    base: Path,
    num_steps: int = 3,
    after_step: Callable[[], object] = bool,
    task: dict[str, Any] = GRPO,
) -> tuple[list[float], list[str]]:
    """Return the losses and rewards of some steps on rollouts, and the notices."""
    figures: list[float] = []
    notices: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            after_step()
            figures.extend((event.loss, event.figures.get("reward", 0.0)))
        elif isinstance(event, Notice):
            notices.append(event.text)

    recipe = Recipe(
        task=task,
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


VARIED = {"use": f"{ROOT / 'benchmarks/workers/varied.py'}:varied"}
ON_POLICY: dict[str, dict[str, Any]] = {
    "grpo": {**GRPO, "rewards": [VARIED], "mask_cut": False},
    "updates": {**GRPO, "rewards": [VARIED], "mask_cut": False, "updates": 2, "kl": 0.1},
    "distill": {
        "type": "distill",
        "answers": "student",
        "teacher": {"answer": True, "min_match": 0, "follow": 0.1},
        "max_new_tokens": 12,
    },
}


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors, those of which only a cycle is left among them."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [one for one in gc.get_objects() if type(one) in kinds]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.parametrize(
    "task", ["grpo", *(pytest.param(one, marks=pytest.mark.slow) for one in [*ON_POLICY][1:])]
)
def test_a_step_on_rollouts_leaves_no_memory(task, base, tmp_path):
    """Without a garbage collection: each step opens an engine, whose answers have other lengths."""
    rows = [{"prompt": f"what is {n}?", "completion": "a fox " * (n % 3 + 1)} for n in range(8)]
    write_rows(tmp_path / "rows.jsonl", rows)
    memory: list[tuple[int, int]] = []
    with simulated() as card:
        gc.collect()
        gc.disable()
        try:
            figures, _ = learnt(
                *(tmp_path, base, 7),
                lambda: memory.append((card.allocated, bytes_of_tensors())),
                ON_POLICY[task],
            )
        finally:
            gc.enable()
    assert any(figures[::2])
    on_card, in_all = zip(*memory[2:], strict=True)  # the first steps allocate buffers
    assert len(set(on_card)) == 1, on_card
    assert in_all[-1] - in_all[0] < 1024, in_all  # the next batch, of other lengths
