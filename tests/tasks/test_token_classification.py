"""Token classification: which piece carries a word's tag, losses, and rows that are refused."""

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from peftkit.data.records import Record
from peftkit.errors import BaseError, DataError
from peftkit.events import Table
from peftkit.settings import DataConfig
from peftkit.tasks.classes.token_classification import (
    TokenClassification,
    TokenClassificationConfig,
)
from tests.helpers.classifiers import TAGS, WORDS, save_base, task_for, write_words
from tests.helpers.families import tiny_tokenizer
from tests.helpers.folders import write_rows


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("bert"))


made = partial(task_for, TokenClassificationConfig)


def word_pieces() -> transformers.PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer as BERT's, which splits "wants" into "want" and "##s"."""
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "want", "##s", "pizza", "Anna", "mar", "##ghe"]
    vocabulary = {word: number for number, word in enumerate([*words, "##rita", "?"])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]"
    )


def test_first_piece_of_each_word_carries_its_tag(bert, tmp_path):
    _, task, _ = made(bert, write_words(tmp_path / "rows.jsonl"))
    assert task.labels == TAGS
    pieces = word_pieces()
    task.texts.tokenizer = pieces
    words, tags = WORDS[0]
    record = Record({"words": words, "tags": tags}, "here")
    (row,) = task.rows.encoder.read([record], "here").examples
    expected = pieces(words, is_split_into_words=True)
    first = [expected.word_ids().index(number) for number in range(len(words))]
    assert list(row.input_ids) == expected["input_ids"]
    assert list(row.places) == first == [0, 1, 3, 4]
    assert [task.labels[tag] for tag in row.tags] == tags


def test_tags_follow_the_words_of_a_byte_level_tokenizer(bert, tmp_path):
    base, task, _ = made(bert, write_words(tmp_path / "rows.jsonl"))
    row = task.load(str(tmp_path / "rows.jsonl"))[0]
    assert list(row.input_ids) == base.tokenizer("Anna wants pizza margherita")["input_ids"]
    tagged = [(tag, text.strip()) for tag, text in task.spans(row) if tag]
    assert [tag for tag, _ in tagged] == WORDS[0][1]
    for (_, text), word in zip(tagged, WORDS[0][0], strict=True):
        assert word.startswith(text)
    special = [text for tag, text in task.spans(row) if not tag]
    assert special[0] == "<s>"
    assert special[-1] == "<|im_end|>"


def test_loss_is_that_of_transformers(bert, tmp_path):
    data = write_words(tmp_path / "rows.jsonl")
    base, task, _ = made(bert, data)
    batch = task.collate(task.load(data))
    labels = torch.full(batch["input_ids"].shape, -100)
    labels.view(-1)[batch["target_index"]] = batch["targets"]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    theirs = base.model(**inputs, labels=labels).loss
    mean = task.loss(base.model, batch)[0] / task.num_targets(batch)
    torch.testing.assert_close(mean, theirs, rtol=1e-6, atol=1e-6)


def test_metrics_are_of_entities_or_of_plain_tags(bert, tmp_path):
    data = write_words(tmp_path / "rows.jsonl")
    base, task, _ = made(bert, data)
    found = task.metrics(base.model, task.load(data))
    assert found.keys() == {"loss", "accuracy", "entity_precision", "entity_recall", "entity_f1"}
    rows = [{"words": ["a", "dog"], "tags": ["DET", "NOUN"]}]
    base, task, _ = made(bert, write_rows(tmp_path / "plain.jsonl", rows))
    row = task.load(str(tmp_path / "plain.jsonl"))[0]
    with torch.no_grad():
        logits = base.model(torch.tensor([row.input_ids])).logits[0, list(row.places)]
    right = sum(int(tag) == true for tag, true in zip(logits.argmax(-1), row.tags, strict=True))
    found = task.metrics(base.model, [row])
    assert found["accuracy"] == found["f1_micro"] == right / 2


def test_words_behind_the_cut_are_counted_and_not_learnt(bert, tmp_path):
    data = write_words(tmp_path / "rows.jsonl")
    _, task, seen = made(bert, data, max_length=8)
    rows = task.load(data)
    assert max(len(row.input_ids) for row in rows) == 8
    num_kept = sum(len(row.places) for row in rows)
    (table,) = (event for event in seen if isinstance(event, Table))
    counts = dict(table.rows)
    assert 0 < num_kept < 10
    assert counts["words"] == "10"
    assert counts["words without a token"] == str(10 - num_kept)
    assert int(counts["cut at 8 tokens"]) > 0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"words": ["a", "b"], "tags": ["X"]}, r"rows\.jsonl:2: tags: 2 words and 1 tags"),
        ({"words": "a b", "tags": ["X", "Y"]}, "words: expected a JSON list"),
        ({"words": [], "tags": []}, "words: empty"),
        ({"words": ["a", " "], "tags": ["X", "Y"]}, r"words\[1\]: empty"),
        ({"words": ["a", 3], "tags": ["X", "Y"]}, r"words\[1\]: expected text"),
        ({"words": ["a"], "tags": [None]}, "as label, found None"),
        ({"words": ["a"]}, "tags: missing"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row, words, bert, tmp_path):
    good = {"words": ["a", "b"], "tags": ["X", "Y"]}
    data = write_rows(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(DataError, match=words):
        made(bert, data)[1].load(data)


def test_a_tokenizer_that_knows_no_places_is_refused(bert, tmp_path):
    data = write_words(tmp_path / "rows.jsonl")
    base, _, _ = made(bert, data)

    class Slow:
        is_fast = False

    with pytest.raises(BaseError, match=r"tokenizer\.json"):
        TokenClassification(base.model, Slow(), TokenClassificationConfig(), DataConfig(train=data))
    assert tiny_tokenizer().is_fast
