"""Hard negatives are the closest texts that are no answers, whatever is in memory at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel
from typer.testing import CliRunner

from peftkit.base.load import load_base
from peftkit.errors import AdapterError, DataError
from peftkit.evaluation import make_rows
from peftkit.evaluation.make_rows import HardNegatives, embedded, find_hard_negatives
from peftkit.formats.open_adapter import Opened, open_adapter
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from peftkit_cli.app import app
from tests.helpers.classifiers import framing_tokenizer
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import write_rows

ANIMALS = ["the quick brown fox", "the lazy dog", "a brown dog jumps", "the fox and the dog"]
FOOD = ["pizza with cheese", "extra olives", "olives and cheese", "a pizza"]
PAIRS = [
    {"anchor": f"what {n} {text[::-1]}?", "positive": text}
    for n, text in enumerate([*ANIMALS, *FOOD])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained embedding adapter, run/, and its rows, rows.jsonl."""
    folder = tmp_path_factory.mktemp("embedding")
    torch.manual_seed(0)
    BertModel(ARCHITECTURES["bert"]().config).save_pretrained(folder / "base")
    framing_tokenizer().save_pretrained(folder / "base")
    recipe: dict[str, Any] = {
        "task": "embedding",
        "base": {"model": str(folder / "base"), "dtype": "fp32"},
        "method": {"type": "lora", "rank": 2},
        "data": {"train": write_rows(folder / "rows.jsonl", PAIRS), "max_length": 64},
        "train": {"output_dir": str(folder / "run"), "max_steps": 2},
    }
    run_recipe(Recipe(**recipe))
    return folder


@pytest.fixture(scope="module")
def opened(folder: Path) -> Opened:
    return open_adapter(folder / "run")


def negatives_of(
    opened: Opened, folder: Path, rows: list[dict[str, str]], **settings: Any
) -> HardNegatives:
    return find_hard_negatives(opened, write_rows(folder / "pairs.jsonl", rows), **settings)


def by_definition(
    opened: Opened, rows: list[dict[str, str]], number: int, margin: float
) -> list[list[str]]:
    from peftkit.settings import DataConfig

    task: Any = opened.task.on(opened.base.model, opened.base.processor, DataConfig(train=""))
    texts = list(dict.fromkeys(row["positive"] for row in rows))
    ours = embedded(task, opened.base.model, texts, lambda event: None)
    expected = []
    for row in rows:
        (query,) = embedded(task, opened.base.model, [row["anchor"]], lambda event: None)
        right = {other["positive"] for other in rows if other["anchor"] == row["anchor"]}
        positive = ours[texts.index(row["positive"])]
        limit = float(query @ positive) - margin * abs(float(query @ positive))
        ranked = sorted(
            (
                (-float(query @ vector), text)
                for text, vector in zip(texts, ours, strict=True)
                if text not in right
                and float(query @ vector) <= limit
                and float(vector @ positive) <= 1 - margin
            )
        )
        expected.append([text for _, text in ranked][:number])
    return expected


@pytest.mark.parametrize(("chunk", "margin"), [(3, 0.0), (4_096, 0.02)])
def test_they_are_the_closest_that_are_no_answers(chunk, margin, opened, folder, monkeypatch):
    monkeypatch.setattr(make_rows, "CHUNK", chunk)
    rows = [*PAIRS, {"anchor": PAIRS[0]["anchor"], "positive": "the fox jumps"}]
    expected = by_definition(opened, rows, 2, margin)
    mined = negatives_of(opened, folder, rows, number=2, margin=margin)
    full = [(row, some) for row, some in zip(rows, expected, strict=True) if len(some) == 2]
    assert mined.rows == [{**row, "negatives": some} for row, some in full]
    assert mined.num_few == len(rows) - len(full)
    reranked = negatives_of(opened, folder, rows, number=2, margin=margin, task="reranker")
    assert [row["negatives"] for row in reranked.rows] == [some for some in expected if some]
    assert {*reranked.rows[0]} == {"query", "positive", "negatives"}


def test_texts_are_cut_as_in_training(opened, folder):
    same = ["the fox " * 40 + end for end in ("olives", "pizza")]  # data.max_length is 64
    rows = [*PAIRS, *({"anchor": f"{text}?", "positive": text} for text in same)]
    mined = negatives_of(opened, folder, rows, number=9, margin=1e-6, task="reranker")
    of_same = [row["negatives"] for row in mined.rows if row["positive"] in same]
    assert of_same
    assert not {*same} & {text for negatives in of_same for text in negatives}


def test_what_is_too_close_is_counted_and_left_out():
    degrees = {"the positive": 20, "nearly it": 30, "closer": 5, "hard": 60, "easy": 120}
    angles = torch.deg2rad(torch.tensor([*degrees.values()], dtype=torch.float32))
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
    anchor = (["the anchor"], torch.tensor([[1.0, 0.0]]))
    pairs = [("the anchor", "the positive")]
    chosen, counts = make_rows._closest_negatives(
        pairs, anchor, ([*degrees], vectors), 2, 0.05, lambda event: None
    )
    assert chosen == [["hard", "easy"]]
    assert counts == {"closer than the margin": 1, "nearly the positive": 1}


def test_the_command_writes_rows_that_a_task_trains_on(folder, tmp_path):
    more = write_rows(tmp_path / "more.jsonl", [{"text": "the answer"}, {"text": "the question"}])
    out = tmp_path / "rows.jsonl"
    command = ["data", str(folder / "rows.jsonl"), "--hard-negatives", str(folder / "run")]
    command += ["--candidates", more, "--negatives", "1", "--margin", "0", "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--for", "reranker"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {*rows[0]} == {"query", "positive", "negatives"}
    assert CliRunner().invoke(app, command[:4]).exit_code == 2  # where to?


def test_what_cannot_be_is_an_error(opened, folder, model_folder):
    with pytest.raises(DataError, match=r"No row of .* has 9 negatives"):
        negatives_of(opened, folder, PAIRS, number=9)
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: positive: missing"):
        negatives_of(opened, folder, [{"anchor": "a"}])
    base = load_base(str(model_folder), dtype="fp32")
    from peftkit.tasks.tokens import CausalLMConfig

    other = Opened(base, opened.adapter, opened.file, CausalLMConfig())
    with pytest.raises(AdapterError, match="makes no embeddings"):
        find_hard_negatives(other, "rows.jsonl")
