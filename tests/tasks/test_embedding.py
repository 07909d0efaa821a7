"""Texts that mean the same come close: one loss of a step, whatever goes through at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.errors import BaseError, DataError
from peftkit.evaluation.evaluate import evaluate
from peftkit.evaluation.predict import predict_file
from peftkit.formats.open_adapter import open_adapter
from peftkit.merging.merge import merge
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig
from peftkit.tasks.retrieval.embedding import Embedding, EmbeddingConfig, pooling_of
from tests.helpers.classifiers import framing_tokenizer
from tests.helpers.families import ARCHITECTURES
from tests.helpers.finished import finished, sections
from tests.helpers.folders import write_rows
from tests.helpers.toy import step_of

ROWS = [
    {"anchor": "the quick brown fox", "positive": "jumps over the dog", "negatives": ["olives"]},
    {"anchor": "pizza with cheese", "positive": "extra olives please", "negatives": ["the fox"]},
    {"anchor": "what is the answer?", "positive": "the question", "negatives": ["an olive"]},
    {"anchor": "is the dog lazy?", "positive": "the dog is lazy", "negatives": ["the answer"]},
    {"anchor": "three olives and cheese", "positive": "a pizza", "negatives": ["a brown dog"]},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    from transformers import BertModel

    made = BertModel(ARCHITECTURES["bert"]().config)
    made.save_pretrained(tmp_path / "bert")
    framing_tokenizer().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def embedding(folder: Path, rows: list[dict[str, Any]], **asked: Any) -> tuple[Any, Embedding, Any]:
    settings = EmbeddingConfig(**asked)
    base = load_base(str(folder), dtype="fp32", purpose=settings.purpose)
    attach(base.model, LoRA(rank=2, targets=("q", "v", "up")))
    file = write_rows(folder.parent / "rows.jsonl", rows)
    task = settings.on(base.model, base.tokenizer, DataConfig(train=file, max_length=64))
    assert isinstance(task, Embedding)
    return base.model, task, task.load(file)


def vector(model: nn.Module, ids: tuple[int, ...]) -> torch.Tensor:
    hidden: torch.Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state
    return normalize(hidden[0].mean(0), dim=0)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_loss_is_its_formula(symmetric, folder):
    model, task, rows = embedding(folder, ROWS, symmetric=symmetric)
    texts = [[vector(model, text.input_ids) for text in row.texts] for row in rows]
    anchors = torch.stack([row[0] for row in texts])
    candidates = torch.stack([row[n] for n in (1, 2) for row in texts])
    scores, right = 20 * anchors @ candidates.T, torch.arange(len(rows))
    expected = cross_entropy(scores, right, reduction="sum")
    if symmetric:
        back = cross_entropy(scores[:, : len(rows)].T, right, reduction="sum")
        expected = (expected + back) / 2
    found = task.loss(model, task.collate(rows))
    assert found[0].item() == pytest.approx(expected.item(), rel=1e-4)
    hits = (scores.argmax(1) == right).float().mean().item()
    assert task.metric_means((found[1:].detach() / 5).tolist())["accuracy"] == pytest.approx(hits)


@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_parts_of_a_step_have_the_gradient_of_the_whole(dropout, folder):
    found = []
    for size in (5, 2) if not dropout else (2, 2):
        model, task, rows = embedding(folder, ROWS)
        model.train(dropout)
        step = step_of(model, task, max_grad_norm=None)
        step.use(replace(step.plan, rows=size))
        torch.manual_seed(1)
        (rows,) = task.before_step(rows, step.run)
        facts = step(rows, 1e-2)
        weights = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        found.append((facts.loss, facts.grad_norm, weights))
    for loss, norm, weights in found[1:]:
        assert (loss, norm) == pytest.approx(found[0][:2], rel=1e-4)
        for a, b in zip(weights, found[0][2], strict=True):
            # AdamW's first step is the gradient's sign: small ones may have either
            assert ((a - b).abs() < 1e-4).float().mean() > 0.95


def test_equal_texts_are_no_wrong_answers(folder):
    twice = [ROWS[0], {**ROWS[1], "anchor": ROWS[0]["anchor"]}, {**ROWS[2], "positive": "a pizza"}]
    twice.append(ROWS[4])  # its positive is that of the row before
    model, task, rows = embedding(folder, twice)
    masked = task.loss(model, task.collate(rows))[2]
    # of the first two rows each other's positive, for they have one anchor; of the others too
    assert masked.item() == 4


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"anchor": "a"}, r"rows\.jsonl:2: positive: missing"),
        ({"anchor": " ", "positive": "b"}, r"rows\.jsonl:2: anchor"),
        ({"anchor": "a", "positive": "b", "negatives": ["b"]}, "one is equal to positive"),
        ({"anchor": "a", "positive": "b"}, r"rows\.jsonl:2 has 0"),
    ],
)
def test_what_is_no_row_is_named(row, found, folder):
    with pytest.raises(DataError, match=found):
        embedding(folder, [ROWS[0], row])


def test_pooling_is_the_bases_own(folder):
    model, _, _ = embedding(folder, ROWS)
    assert pooling_of(model, "auto", "auto") == pooling_of(model, "mean", True)
    pool = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "b.Pooling", "path": "1_Pooling"}]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pool))
    (folder / "modules.json").write_text(json.dumps(modules))
    assert pooling_of(model, "auto", "auto") == pooling_of(model, "cls", False)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(BaseError, match="pooling_mode_max_tokens"):
        pooling_of(model, "auto", "auto")


@pytest.mark.covers("peftkit")
def test_a_run_learns_to_find_and_writes_vectors(folder, tmp_path):
    file = write_rows(tmp_path / "train.jsonl", ROWS)
    told = sections(tmp_path, folder, file, "embedding")
    train = {"max_steps": 40, "batch_size": 5, "learning_rate": 0.01}
    result = finished(told, data={"eval": file}, train=train)
    opened = open_adapter(tmp_path / "run")
    found = evaluate(opened.base, file, task=opened.task)
    assert found["recall@1"] == result.metrics["eval_recall@1"] >= 0.8
    assert found["recall@5"] >= found["recall@1"]
    with opened.adapter.disabled():
        before = evaluate(opened.base, file, task=opened.task)
    assert before["loss"] > 2 * found["loss"]
    assert before["mrr"] < found["mrr"]
    rows = predict_file(opened, file)
    assert rows[0]["anchor"] == ROWS[0]["anchor"]
    vectors = torch.tensor([row["embedding"] for row in rows])
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))


def test_a_merged_model_is_a_folder_of_sentence_transformers(folder, tmp_path):
    file = write_rows(tmp_path / "train.jsonl", ROWS)
    told = sections(tmp_path, folder, file, "embedding", pooling="cls", normalize=False)
    finished(told, train={"max_steps": 2, "batch_size": 5})
    merge(tmp_path / "run", tmp_path / "merged")
    modules = json.loads((tmp_path / "merged" / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling"]
    opened = open_adapter(tmp_path / "run")
    wanted = [row["embedding"] for row in predict_file(opened, file)]
    base = load_base(str(tmp_path / "merged"), dtype="fp32", purpose=EmbeddingConfig().purpose)
    task = EmbeddingConfig().on(base.model, base.tokenizer, DataConfig(train=file))  # all auto
    assert isinstance(task, Embedding)
    found = task.vectors(base.model, [str(row["anchor"]) for row in ROWS])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
