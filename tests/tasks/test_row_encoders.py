"""Every task's rows come back from their Arrow file as they were encoded, and are encoded once."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from peftkit.data.encode import DocumentEncoder
from peftkit.data.records import Dropped, read_records
from peftkit.data.rows import cache as data_rows
from peftkit.data.rows.cache import encoded
from peftkit.data.rows.encoder import RowEncoder
from peftkit.tasks.classes.sequence_classification import (
    LabelledEncoder,
    SequenceClassificationConfig,
)
from peftkit.tasks.classes.token_classification import TaggedEncoder, TokenClassificationConfig
from peftkit.tasks.pairs.preference import ComparedEncoder, JudgedEncoder
from peftkit.tasks.pairs.reward import RewardConfig, RewardEncoder
from peftkit.tasks.retrieval.embedding import EmbeddingConfig, EmbeddingEncoder
from peftkit.tasks.text.masked_lm import MaskedEncoder, MaskedLMConfig
from peftkit.tasks.text.seq2seq import PairEncoder, Seq2SeqConfig
from peftkit.tasks.texts import Texts
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import write_rows as write

Tokenizer = PreTrainedTokenizerFast
FOX = "the quick brown fox jumps over the lazy dog"
YES = [{"prompt": f"say {n} ", "completion": "yes " * (n % 7)} for n in range(30)]
PAIRS = [{"prompt": f"{n} ", "chosen": "yes " * (1 + n % 9), "rejected": "no"} for n in range(30)]
VERDICTS = [{**row, "completion": "yes", "label": n % 3 == 0} for n, row in enumerate(YES)]


def texts(tokenizer: Tokenizer) -> Texts:
    return Texts(ARCHITECTURES["bert_cls"](), tokenizer, 24)


def of_text(row: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"text": f"{n} {FOX}", **row(n)} for n in range(30)]


def labelled(problem: Any) -> Callable[[Tokenizer], RowEncoder]:
    asked = SequenceClassificationConfig(problem=problem)
    return lambda tokenizer: LabelledEncoder(texts(tokenizer), asked, ("a", "b"), problem)


CASES: dict[str, tuple[Callable[[Tokenizer], RowEncoder], list[dict[str, Any]]]] = {
    "documents": (lambda t: DocumentEncoder(t, None, "auto", 12), YES),
    "pairs": (
        lambda t: PairEncoder(t, Seq2SeqConfig(prefix="q: "), "auto", 9, 5),
        YES,
    ),
    "masked": (
        lambda t: MaskedEncoder(t, MaskedLMConfig(share=0.2), "auto", 9),
        [*of_text(lambda n: {}), {"text": ""}],
    ),
    "label": (labelled("single_label"), of_text(lambda n: {"label": "ab"[n % 2]})),
    "labels": (labelled("multi_label"), of_text(lambda n: {"label": ["a", "b"][: n % 3]})),
    "number": (labelled("regression"), of_text(lambda n: {"label": n / 7})),
    "tags": (
        lambda t: TaggedEncoder(texts(t), TokenClassificationConfig(), ("O", "X")),
        [{"words": FOX.split()[: 1 + n % 5], "tags": ["O", "X", "O", "O", "X"][: 1 + n % 5]}
         for n in range(30)],
    ),
    "preferences": (lambda t: ComparedEncoder(t, None, 9), PAIRS),
    "verdicts": (lambda t: JudgedEncoder(t, None, 9), VERDICTS),
    "rewards": (lambda t: RewardEncoder(texts(t), RewardConfig(), None), PAIRS),
    "embeddings": (
        lambda t: EmbeddingEncoder(texts(t), EmbeddingConfig()),
        [{"anchor": f"{n} a", "positive": "b", "negatives": [f"{n} c"]} for n in range(30)],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def never(*args: Any) -> Any:
    raise AssertionError("it encodes")


@pytest.mark.parametrize("name", CASES)
def test_rows_come_back_as_they_were_encoded_and_only_once(name, tmp_path, tokenizer, monkeypatch):
    made, given = CASES[name]
    where = write(tmp_path / "rows.jsonl", given)
    encoder = made(copy.deepcopy(tokenizer))
    plain = encoder.rows(encoder.read(read_records(where), where)).rows
    kept = [row for row in plain if not isinstance(row, Dropped)]
    rows = encoded(where, made(copy.deepcopy(tokenizer)))
    assert list(rows) == kept
    first = next(iter(encoder.drops), None)
    if first is not None:
        assert list(rows.dropped(first)) == [
            row.source for row in plain if row == Dropped(row.source, first)
        ]
    monkeypatch.setattr(data_rows, "blocks", never)
    again = encoded(where, made(tokenizer))
    assert list(again) == kept
    assert again.counts == rows.counts
