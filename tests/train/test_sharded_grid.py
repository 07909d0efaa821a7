"""Every task learns sharded what it learns alone, with every method that can be sharded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from peftkit.formats.peft.load import named_tensors
from tests.helpers.gguf_files import config_of_a_small_llama, in_blocks, write_gguf
from tests.helpers.sharded import Settings, events, run_alone, run_ranks, samples, settings_of
from tests.helpers.vision import CONVERSATIONS, write_image_rows
from tests.helpers.vision import FAMILIES as VISION

SECTIONS: dict[str, dict[str, Settings]] = {
    "nf4": {"base": {"quantize": "nf4"}},
    "recomputed": {"train": {"gradient_checkpointing": True}},
    "offload": {"base": {"quantize": "int8"}, "train": {"shard": "offload"}},
    "best": {
        "train": {
            "eval_every": 1,
            "learning_rate": 0.2,  # it gets worse
            "early_stopping": {"patience": 1, "min_delta": 0.5},
            "keep_best": True,
        }
    },
    "generating": {"train": {"sample_every": 2, "eval_generate": 5, "sample_tokens": 9}},
}
SECTIONS["nf4-generating"] = SECTIONS["nf4"] | SECTIONS["generating"]
CELLS: dict[str, tuple[str, str, str]] = {
    # task, method, how: each task twice, each method with tasks of several kinds
    "causal_lm": ("causal_lm", "vera", "nf4-generating"),
    "stopped-early": ("causal_lm", "lora", "best"),
    "seq2seq": ("seq2seq", "ia3", "generating"),
    "sequence_classification": ("sequence_classification", "dora", ""),
    "token_classification": ("token_classification", "lora", "nf4"),
    "preference": ("preference", "lora", "recomputed"),
    "preference-dora": ("preference", "dora", "nf4"),
    "kto": ("kto", "lora", ""),
    "kto-ia3": ("kto", "ia3", "recomputed"),
    "reward": ("reward", "lora", "offload"),
    "reward-vera": ("reward", "vera", "recomputed"),
    "embedding": ("embedding", "lora", ""),
    "embedding-ia3": ("embedding", "ia3", "nf4"),
}
IMAGES = ("llava", "idefics3")
"""Rows of images in one list, and by row."""


def blocks_settings(folder: Path) -> Settings:
    """Return a recipe over a GGUF file whose weights stay in blocks of several types."""
    folder.mkdir()
    path = folder / "mixed.gguf"
    write_gguf(path, LlamaForCausalLM(config_of_a_small_llama()), in_blocks)
    return settings_of(folder, "causal_lm", base={"model": str(path)})


def image_settings(folder: Path, family: str) -> Settings:
    """Return a recipe over rows with and without images: in a step a process may have none."""
    folder.mkdir()
    model, processor = VISION[family].build()
    model.save_pretrained(folder / "base")
    processor.save_pretrained(folder / "base")
    rows = str(write_image_rows(folder, CONVERSATIONS))
    train: dict[str, Any] = {"batch_size": 1, "tokens_per_batch": None, "gradient_accumulation": 2}
    base = {"model": str(folder / "base")}
    made = settings_of(folder, "causal_lm", base=base, train=train)
    targets = {"type": "lora", "rank": 3, "targets": ["all-linear"]}
    data = {"train": rows, "eval": rows, "max_length": None}
    return {**made, "task": {"type": "image_text"}, "method": targets, "data": data}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Settings]:
    folder = tmp_path_factory.mktemp("recipes")
    return {
        name: settings_of(folder / name, task, method, **SECTIONS.get(how, {}))
        for name, (task, method, how) in CELLS.items()
    } | {
        "gguf": blocks_settings(folder / "gguf"),
        **{name: image_settings(folder / name, name) for name in IMAGES},
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, cells: dict[str, Settings]) -> Path:
    folder = tmp_path_factory.mktemp("two")
    assert run_ranks(folder, cells) == {}
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CELLS, "gguf", *IMAGES])
def test_two_ranks_learn_what_one_does(name, cells, two, tmp_path):
    run_alone(cells[name], tmp_path / "one")
    check_same(two / name, tmp_path / "one")


def check_same(ours: Path, theirs: Path) -> None:
    """Make sure that two runs have learnt the same, step by step."""
    pairs = zip(events(ours), events(theirs), strict=True)
    for our, their in pairs:
        assert our["event"] == their["event"]
        if our["event"] == "StepDone":
            assert our["loss"] == pytest.approx(their["loss"], rel=1e-5)
        else:
            assert our["metrics"] == pytest.approx(their["metrics"], rel=1e-4)
    assert samples(ours) == samples(theirs)
    tensors = named_tensors(theirs)
    for path, tensor in named_tensors(ours).items():
        torch.testing.assert_close(tensor, tensors[path], rtol=1e-3, atol=1e-4)
