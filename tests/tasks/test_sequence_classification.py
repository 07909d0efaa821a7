"""Sequence classification: problems found in data, batches, losses, and rows that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peftkit.base.load import Base
from peftkit.errors import BaseError, ConfigError, DataError
from peftkit.events import Table
from peftkit.settings import DataConfig
from peftkit.tasks.classes.sequence_classification import (
    SequenceClassification,
    SequenceClassificationConfig,
)
from peftkit.tasks.table import TASKS
from tests.helpers.classifiers import TEXTS, save_base, task_for, write_texts
from tests.helpers.folders import write_rows

PROBLEMS: dict[str, list[Any]] = {
    "single_label": ["b", "a", "b"],
    "multi_label": [["b"], ["a", "b"], []],
    "regression": [0.5, -2.25, 3],
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("bert"))


def made(folder: Path, data: str, **settings: Any) -> tuple[Base, SequenceClassification]:
    """Return a base for these rows and the task on it."""
    return task_for(SequenceClassificationConfig, folder, data, **settings)[:2]


def labelled(tmp_path: Path, values: list[Any], name: str = "rows.jsonl") -> str:
    texts = [text for text, _ in TEXTS]
    rows = ({"text": t, "label": v} for t, v in zip(texts, values, strict=False))
    return write_rows(tmp_path / name, rows)


@pytest.mark.parametrize(
    ("values", "problem", "labels"),
    [
        (["b", "a", "b"], "single_label", ("a", "b")),
        ([10, 9, 10], "single_label", ("9", "10")),
        ([["b"], [], ["a", "b"]], "multi_label", ("a", "b")),
        ([1, 2.5], "regression", ()),
        (["1.5", "2"], "regression", ()),
    ],
)
def test_problem_and_labels_are_found_in_the_data(values, problem, labels, tmp_path):
    config = DataConfig(train=labelled(tmp_path, values))
    found = SequenceClassificationConfig().resolve(config)
    assert (found.problem, found.labels) == (problem, labels)
    assert found.resolve(DataConfig(train="nowhere.jsonl")) == found  # all is said: nothing is read


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_loss_is_that_of_transformers(problem, family, tmp_path):
    data = labelled(tmp_path, PROBLEMS[problem])
    base, task = made(save_base(tmp_path / "base", family), data)
    batch = task.collate(task.load(data))
    mean = task.loss(base.model, batch)[0] / task.num_targets(batch)
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    assert base.model.config.problem_type == task.config.purpose.head.problem_type
    theirs = base.model(**inputs, labels=batch["targets"]).loss
    torch.testing.assert_close(mean, theirs, rtol=1e-6, atol=1e-6)


def test_metrics_are_those_of_the_rows(tmp_path, bert):
    data = write_texts(tmp_path / "rows.jsonl")
    base, task = made(bert, data)
    rows = task.load(data)
    batch = task.collate(rows)
    with torch.no_grad():
        logits = base.model(**{n: t for n, t in batch.items() if n != "targets"}).logits
    right = (logits.argmax(-1) == batch["targets"]).float().mean()
    found = task.metrics(base.model, rows)
    assert found["accuracy"] == pytest.approx(float(right))
    assert found["loss"] == pytest.approx(float(task.loss(base.model, batch)[0]) / len(rows))
    assert {"f1_macro", "f1_weighted"} <= found.keys()
    texts = [text for text, _ in TEXTS]
    torch.testing.assert_close(task.predict(base.model, texts), logits.softmax(-1))


@pytest.mark.parametrize("problem", ["single_label", "multi_label"])
def test_sums_of_batches_are_the_metrics_of_all_rows(problem, tmp_path, bert):
    data = labelled(tmp_path, PROBLEMS[problem])
    base, task = made(bert, data)
    rows = task.load(data)
    found = task.metrics(base.model, rows)
    with torch.no_grad():
        sums = sum(task.loss(base.model, task.collate([row])) for row in rows)
        num_targets = sum(task.num_targets(task.collate([row])) for row in rows)
    means = task.eval_means((sums[1:] / num_targets).tolist())
    assert means == pytest.approx({name: found[name] for name in ("accuracy", "f1_macro")})


def test_weights_of_classes_are_those_of_torch(tmp_path, bert):
    labels = ["a"] * 4 + ["b"]
    data = labelled(tmp_path, labels)
    settings = SequenceClassificationConfig(class_weights="balanced")
    found = settings.resolve(DataConfig(train=str(data)))
    assert found.class_weights == {"a": 5 / 8, "b": 5 / 2}  # scikit-learn's compute_class_weight
    base, task = made(bert, data, class_weights="balanced")
    batch = task.collate(task.load(data))
    logits = task.logits(base.model, batch)
    expected = torch.nn.functional.cross_entropy(
        logits, batch["targets"], torch.tensor([5 / 8, 5 / 2]), reduction="sum"
    )
    torch.testing.assert_close(task.loss(base.model, batch)[0], expected)
    wrong = SequenceClassificationConfig(class_weights={"a": 1, "c": 2})
    with pytest.raises(ConfigError, match="does not match the labels"):
        wrong.resolve(DataConfig(train=str(data)))
    with pytest.raises(ConfigError, match="one label each"):
        SequenceClassificationConfig(class_weights="balanced", problem="regression")


def test_other_problems_have_their_own_metrics(tmp_path, bert):
    for problem, names in {
        "multi_label": {"loss", "accuracy", "f1_micro", "f1_macro"},
        "regression": {"loss", "mse", "pearson"},
    }.items():
        data = labelled(tmp_path, PROBLEMS[problem])
        base, task = made(bert, data)
        found = task.metrics(base.model, task.load(data))
        assert found.keys() == names
        assert problem != "regression" or found["mse"] == pytest.approx(found["loss"])
        probable = task.predict(base.model, ["the dog"])
        assert problem == "regression" or bool(((probable > 0) & (probable < 1)).all())


def test_pairs_are_tokenised_as_pairs(tmp_path, bert):
    rows = [
        {"question": "what is it?", "answer": "the dog", "label": "yes"},
        {"question": "and the other?", "answer": "a pizza", "label": "no"},
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    base, task = made(bert, data, text="question", pair="answer")
    row = task.load(data)[0]
    made_by_hand = base.tokenizer("what is it?", "the dog")
    assert list(row.input_ids) == made_by_hand["input_ids"]
    assert task.spans(row)[0] == ("yes", base.tokenizer.decode(row.input_ids))
    assert task.predict(base.model, [("what is it?", "the dog")]).shape == (1, 2)
    for wrong in ("what is it?", ("what is it?", " ")):
        with pytest.raises(DataError, match="Give pairs of texts"):
            task.predict(base.model, [wrong])


def test_long_texts_keep_their_frame_and_are_counted(tmp_path, bert):
    data = labelled(tmp_path, PROBLEMS["single_label"])
    base, task, seen = task_for(SequenceClassificationConfig, bert, data, max_length=6)
    rows = task.load(data)
    ends = {row.input_ids[-1] for row in rows}
    assert {len(row.input_ids) for row in rows} == {6}
    assert ends == {base.tokenizer.eos_token_id}
    (table,) = (event for event in seen if isinstance(event, Table))
    assert ("cut at 6 tokens", "3") in table.rows
    assert ("rows per label", "a 1, b 2") in table.rows


def test_a_length_beyond_the_model_is_the_models(bert, tmp_path):
    data = write_texts(tmp_path / "rows.jsonl")
    assert made(bert, data, max_length=4096)[1].texts.max_length == 256
    assert made(bert, data, max_length=None)[1].texts.max_length == 256
    config = transformers.RobertaConfig(**{**_SMALL, "max_position_embeddings": 66})
    model = transformers.RobertaForMaskedLM(config)
    roberta = save_base(tmp_path / "roberta", model=model)
    assert made(roberta, data)[1].texts.max_length == 64
    assert made(roberta, data, max_length=None)[1].texts.max_length == 65  # pad is 0 here, not 1


_SMALL = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{"text": "a", "label": "x"}, {"text": "b"}], {}, "2: label: missing"),
        ([{"txt": "a", "label": "x"}, {"txt": "b", "label": "y"}], {}, "Did you mean 'txt'"),
        ([{"text": " ", "label": "x"}, {"text": "b", "label": "y"}], {}, "1: text: empty"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], {}, "1 different ones: 'x'"),
        ([{"text": "a", "label": s} for s in ("x", "y", "X")], {}, "spaces alone: 'X', 'x'"),
        ([{"text": "a", "label": [s]} for s in ("x", "y", "y ")], {}, "spaces alone: 'y', 'y '"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": 1.5}], {}, "2: a number"),
        (
            [{"text": "a", "label": [1.5]}, {"text": "b", "label": ["y"]}],
            {},
            r"1: expected a text or a whole number as label, found 1\.5",
        ),
        ([{"text": "a", "label": "x"}], {"problem": "regression"}, "1: expected a number, found"),
        ([{"text": "a", "label": "x"}], {"problem": "multi_label"}, "label: expected a JSON list"),
        (
            [{"text": "a", "label": "x"}, {"text": "b", "label": "z"}],
            {"labels": ("x", "y"), "problem": "single_label"},
            "2: the head does not know the label 'z'",
        ),
        ([{"text": "a", "label": "x"}], {"pair": "second"}, "set task.pair|task.pair"),
    ],
)
def test_rows_that_cannot_be_used_are_named(rows, settings, words, bert, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=words):
        made(bert, data, **{"labels": ("x", "y"), **settings} if "pair" in settings else settings)[
            1
        ].load(data)


CLASSIFIERS = ("sequence_classification", "token_classification", "image_classification")


@pytest.mark.parametrize("task", [*CLASSIFIERS, "audio_classification"])
@pytest.mark.parametrize(
    ("labels", "words"), [(("a", "b", "a"), "'a' is repeated"), (("a",), "There is only one")]
)
def test_labels_are_several_and_each_is_listed_once(task, labels, words):
    with pytest.raises(ConfigError, match=words):
        TASKS[task](labels=labels)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"labels": ("a", "b"), "problem": "regression"}, "a regression has no labels"),
        ({"problem": "multi"}, "multi_label"),
    ],
)
def test_settings_that_contradict_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        SequenceClassificationConfig(**settings)


def test_encoder_decoder_needs_the_end_token_that_it_reads(tmp_path):
    data = write_texts(tmp_path / "rows.jsonl")
    base, task = made(save_base(tmp_path / "t5", "t5"), data)
    assert task.metrics(base.model, task.load(data))["loss"] > 0
    config = json.loads((tmp_path / "t5" / "config.json").read_text())
    config["eos_token_id"] = 1
    (tmp_path / "t5" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseError, match="classifies by the end token"):
        made(tmp_path / "t5", data)
