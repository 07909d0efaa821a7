"""Rows that are padded together lose what they lose alone, in every task that reads rows whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.data.load import DataConfig
from peftkit.tasks.masked_lm import MaskedLMConfig
from peftkit.tasks.seq2seq import Seq2SeqConfig
from peftkit.tasks.sequence_classification import SequenceClassificationConfig
from peftkit.tasks.token_classification import TokenClassificationConfig
from tests.families import ARCHITECTURES
from tests.tasks.classifiers import TEXTS, WORDS, framing_tokenizer, save_base, task_for, write_rows

HEADS = ("bert", "roberta", "llama", "gpt2")
LABELS: dict[str, list[Any]] = {
    "one label": ["b", "a", "b"],
    "several labels": [["b"], ["a", "b"], []],
    "numbers": [0.5, -2.25, 3],
}
PAIRS = [
    {"prompt": "the quick brown fox", "completion": "the fox"},
    {"prompt": "what is the answer? what?", "completion": "the answer is in the question"},
    {"prompt": "pizza", "completion": "olives and cheese, and then the other dog"},
]
CASES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    **{
        name: (
            SequenceClassificationConfig,
            [{"text": t, "label": v} for (t, _), v in zip(TEXTS, values, strict=False)],
        )
        for name, values in LABELS.items()
    },
    "tags": (TokenClassificationConfig, [{"words": w, "tags": t} for w, t in WORDS]),
}


def assert_same(model: Any, task: Any, rows: Any) -> None:
    assert len({len(row.input_ids) for row in rows}) > 1
    batch = task.collate(rows)
    assert task.num_targets(batch) == sum(task.num_targets(task.collate([row])) for row in rows)
    with torch.no_grad():
        together = task.loss_sum(model, batch)
        alone = sum(task.loss_sum(model, task.collate([row])) for row in rows)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)  # sums in another order


@pytest.mark.parametrize("family", HEADS)
def test_rows_of_heads(family: str, tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base", family)
    for name, (kind, rows) in CASES.items():
        data = write_rows(tmp_path / f"{name}.jsonl", rows)
        base, task, _ = task_for(kind, folder, data)
        assert_same(base.model, task, task.load(data))


@pytest.mark.parametrize("name", ["t5", "t5_gated", "mt5", "bart", "pegasus"])
def test_pairs(name: str, tmp_path: Path, tokenizer: Any) -> None:
    model: Any = ARCHITECTURES[name]().eval()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    task = Seq2SeqConfig().on(model, tokenizer, DataConfig(train="", max_length=32))
    assert_same(model, task, task.load(write_rows(tmp_path / "a.jsonl", PAIRS)))


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "distilbert", "modernbert", "deberta_v2", "electra"]
)
def test_masked_texts(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name]().eval()
    own = copy.deepcopy(framing_tokenizer())
    own.mask_token = "<unk>"
    task = MaskedLMConfig().on(model, own, DataConfig(train="", max_length=64))
    rows = task.load(write_rows(tmp_path / "a.jsonl", [{"text": text} for text, _ in TEXTS]))
    assert_same(model, task, rows)
