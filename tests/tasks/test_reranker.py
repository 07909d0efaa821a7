"""A reranker learns which text answers a query, whatever way it is asked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from peftkit.base.load import load_base
from peftkit.errors import BaseError, ConfigError, DataError
from peftkit.evaluation.evaluate import evaluate
from peftkit.evaluation.predict import predict, predict_file
from peftkit.formats.open_adapter import open_adapter
from peftkit.tasks.retrieval.reranker import Reranker, RerankerConfig, RerankRow
from tests.helpers.classifiers import save_base, task_for
from tests.helpers.command_line import peftkit
from tests.helpers.finished import finished, sections
from tests.helpers.folders import write_rows

__all__ = ["peftkit"]  # a fixture

ROWS = [
    {"query": "the fox", "positive": "the quick brown fox", "negatives": ["a pizza", "olives"]},
    {"query": "dog?", "positive": ["the lazy dog", "the other dog"], "negatives": ["cheese"]},
    {"query": "pizza", "positive": "pizza with cheese", "negatives": ["the fox", "a dog jumps"]},
]
SCORED = [
    {"query": row["query"], "text": text, "score": float(n == 0)}
    for row in ROWS
    for n, text in enumerate(
        [*([row["positive"]] if isinstance(row["positive"], str) else row["positive"][:1])]
        + row["negatives"]
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("bert"))


def made(folder: Path, file: str, **settings: Any) -> tuple[Any, Reranker, Any]:
    base, task, _ = task_for(RerankerConfig, folder, file, **settings)
    return base.model, task, task.load(file)


def plain_loss(loss: str, scores: list[torch.Tensor], row: RerankRow) -> tuple[torch.Tensor, int]:
    true = torch.tensor(row.relevance)
    own = torch.stack(scores)
    if loss == "pointwise":
        return binary_cross_entropy_with_logits(own, true, reduction="sum"), len(true)
    if loss == "listwise":
        return -(true / true.sum() * own.log_softmax(0)).sum(), 1
    pairs = [(i, j) for i in range(len(true)) for j in range(len(true)) if true[i] > true[j]]
    return sum((-logsigmoid(own[i] - own[j]) for i, j in pairs), torch.tensor(0.0)), len(pairs)


@pytest.mark.parametrize(
    ("loss", "family"), [("pointwise", "bert"), ("pairwise", "llama"), ("listwise", "llama")]
)
def test_loss_and_gradient_equal_texts_alone(loss, family, tmp_path):
    folder = save_base(tmp_path / family, family)
    model, task, rows = made(folder, write_rows(tmp_path / "a.jsonl", ROWS), loss=loss)
    head = next(p for name, p in model.named_parameters() if p.shape[0] == 1 and p.ndim == 2)
    head.requires_grad_()
    whole = [plain_loss(loss, [one(model, task, text) for text in row.texts], row) for row in rows]
    batch = task.collate(rows)
    found = task.loss(model, batch)[0]
    torch.testing.assert_close(found, sum(value for value, _ in whole), rtol=1e-5, atol=1e-6)
    assert task.num_targets(batch) == sum(count for _, count in whole)
    (ours,) = torch.autograd.grad(found, head)
    (theirs,) = torch.autograd.grad(sum(value for value, _ in whole), head)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def one(model: Any, task: Reranker, text: Any) -> torch.Tensor:
    return task.scores(model, task.texts.collate([text]))[0]


def test_scored_pairs_of_a_query_are_one_ranking(folder, tmp_path):
    first = write_rows(tmp_path / "a.jsonl", SCORED)
    listed = [
        {"query": q, "text": [r["text"] for r in SCORED if r["query"] == q],
         "score": [r["score"] for r in SCORED if r["query"] == q]}
        for q in dict.fromkeys(r["query"] for r in SCORED)
    ]  # fmt: skip
    model, task, rows = made(folder, first)
    together = task.load(write_rows(tmp_path / "b.jsonl", listed))
    alone, found = (task.metrics(model, some) for some in (rows, together))
    assert alone == pytest.approx(found, abs=1e-5)
    assert len(together) == 3


def test_a_template_keeps_its_end_where_texts_are_cut(tmp_path):
    folder = save_base(tmp_path / "base", "llama")
    template = "Query: {query}\nText: {text}\nRelevant:"
    row = {"query": "dog", "positive": "the dog " * 99, "negatives": ["a"]}
    _, task, rows = made(folder, write_rows(tmp_path / "a.jsonl", [row]), template=template)
    long, short = (task.texts.decode(text.input_ids) for text in rows[0].texts)
    assert long.startswith("Query: dog\nText: the dog")
    assert long.endswith("\nRelevant:")
    assert short == "Query: dog\nText: a\nRelevant:"
    assert len(rows[0].texts[0].input_ids) == 64


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_starts_as_yes_over_no(tied, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from tests.helpers.families import ARCHITECTURES

    config = ARCHITECTURES["llama"]().config.to_dict() | {"tie_word_embeddings": tied}
    folder = save_base(tmp_path / "base", model=LlamaForCausalLM(LlamaConfig(**config)))
    settings = {"answers": ("a", "b"), "template": "{query} {text} is"}
    model, task, rows = made(folder, write_rows(tmp_path / "a.jsonl", ROWS), **settings)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    words = [task.tokenizer(w, add_special_tokens=False)["input_ids"][0] for w in ("a", "b")]
    for text in rows[0].texts:
        logits = whole(torch.tensor([text.input_ids])).logits[0, -1, words]
        score = one(model, task, text)
        torch.testing.assert_close(score, logits[0] - logits[1])
        torch.testing.assert_close(score.sigmoid(), logits.softmax(0)[0])
    with pytest.raises(BaseError, match="'dog'"):
        load_base(str(folder), purpose=RerankerConfig(answers=("a", "dog")).purpose)
    encoder = save_base(tmp_path / "encoder", "bert")
    with pytest.raises(BaseError, match=r"classifier\.bias"):
        load_base(str(encoder), purpose=RerankerConfig(answers=("a", "b")).purpose)
    model.save_pretrained(folder)
    with pytest.raises(BaseError, match="has a head already"):
        load_base(str(folder), purpose=RerankerConfig(answers=("a", "b")).purpose)


@pytest.mark.covers("peftkit")
def test_a_run_improves_reported_ranking(folder, tmp_path, peftkit):
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    told = sections(tmp_path, folder, file, "reranker", loss="listwise")
    train = {"max_steps": 25, "batch_size": 3, "learning_rate": 0.01}
    result = finished(told, data={"eval": file}, train=train)
    assert result.metrics["eval_ndcg@10"] == result.metrics["eval_mrr@10"] == 1.0
    assert 0 < result.metrics["before_ndcg@10"] <= 1
    opened = open_adapter(tmp_path / "run")
    found = evaluate(opened.base, file, task=opened.task)
    assert found["ndcg@10"] == 1.0
    good, bad = predict(opened, [("pizza", "pizza with cheese"), ("pizza", "the fox")])
    assert 0 < bad["score"] < good["score"] < 1
    listed = write_rows(
        tmp_path / "b.jsonl", [{"query": "pizza", "text": ["pizza with cheese", "the fox"]}]
    )
    (row,) = predict_file(opened, listed)
    assert row["prediction"] == pytest.approx([good["score"], bad["score"]], abs=1e-5)
    with pytest.raises(DataError, match="rank a text without a query"):
        predict(opened, ["pizza"])
    peftkit("merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged"))
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert list(merged["id2label"].values()) == ["relevance"]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    read = AutoTokenizer.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = plain(**read("pizza", "pizza with cheese", return_tensors="pt")).logits
    assert logits.sigmoid().item() == pytest.approx(good["score"], abs=1e-6)


@pytest.mark.parametrize(
    ("row", "settings", "found"),
    [
        ({"query": " "}, {}, "query: empty"),
        ({"positive": []}, {}, "positive: empty"),
        ({"negatives": ["a", 3]}, {}, r"negatives\[1\]: expected text"),
        ({"negatives": ["the quick brown fox"]}, {}, "negatives: holds a positive"),
        ({"negatives": None}, {"loss": "listwise"}, "equally relevant, and the loss listwise"),
        ({"positive": None, "text": "a", "score": 2}, {}, "score: expected numbers from 0 to 1"),
        ({"positive": None, "text": ["a"], "score": [0, 1]}, {}, "score: 2 scores of 1 texts"),
    ],
)
def test_rows_that_cannot_be_ranked_are_named(row, settings, found, folder, tmp_path):
    wrong = {**ROWS[0], **row}
    if wrong["positive"] is None:
        del wrong["positive"]
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {found}|a\.jsonl:2: .*{found}"):
        made(folder, write_rows(tmp_path / "a.jsonl", [ROWS[1], wrong]), **settings)


def test_rows_kept_for_one_loss_are_read_anew_for_another(folder, tmp_path):
    file = write_rows(tmp_path / "a.jsonl", SCORED)
    made(folder, file, loss="pointwise")
    with pytest.raises(DataError, match="equally relevant, and the loss listwise"):
        made(folder, file, loss="listwise")


def test_a_template_names_query_and_text():
    with pytest.raises(ConfigError, match=r"lacks \{query\} or \{text\}"):
        RerankerConfig(template="Query: {query}")
