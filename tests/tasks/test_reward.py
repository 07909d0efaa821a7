"""A reward model learns which answer is better, and scores texts."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.data.chat_template import CHATML
from peftkit.data.encode import Encoder
from peftkit.data.preferences import Pair, read_pair
from peftkit.data.records import Record
from peftkit.data.style import STYLES, Style
from peftkit.errors import DataError
from peftkit.evaluation.evaluate import evaluate
from peftkit.evaluation.predict import predict, predict_file
from peftkit.events import StepDone
from peftkit.formats.open_adapter import open_adapter
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig
from peftkit.tasks.pairs.reward import Reward, RewardConfig, answered
from tests.helpers.classifiers import save_base
from tests.helpers.command_line import peftkit
from tests.helpers.finished import finished, sections
from tests.helpers.pair_cases import PAIRS, write

__all__ = ["peftkit"]  # a fixture


def write_rows(file: Path) -> str:
    rows = [
        {"prompt": p, "chosen": c, "rejected": r, "by": n / 2} for n, (p, c, r) in enumerate(PAIRS)
    ]
    return write(file, rows)


def reward(folder: Path, file: str, **asked: Any) -> tuple[Any, Reward, list[Any]]:
    settings = RewardConfig(**asked)
    base = load_base(str(folder), dtype="fp32", purpose=settings.purpose)
    attach(base.model, LoRA(rank=2, train_fully=base.head))
    task = settings.on(base.model, base.tokenizer, DataConfig(train=file, max_length=64))
    return base.model, task, task.load(file)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_loss_is_its_formula(kind, model_folder, tmp_path):
    folder = model_folder if kind == "decoder" else save_base(tmp_path / "bert")
    file = write_rows(tmp_path / "a.jsonl")
    model, task, rows = reward(folder, file, margin="by", centring=0.3)
    expected = []
    for row in rows:
        c, r = (
            model(input_ids=torch.tensor([d.input_ids])).logits[0, 0].detach() for d in row.texts
        )
        expected.append(-logsigmoid(c - r - row.margin) + 0.3 * (c + r) ** 2)
    found = task.loss(model, task.collate(rows))
    assert found[0].item() == pytest.approx(sum(map(float, expected)), rel=1e-4)
    assert task.num_targets(task.collate(rows)) == len(PAIRS)


@pytest.mark.parametrize("kind", STYLES)
def test_an_answer_to_a_prompt_has_the_tokens_that_a_row_of_the_style_has(kind, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    template = tokenizer.chat_template = CHATML if kind == "chat" else None
    encoder, (prompt, text, _) = Encoder(tokenizer, template), PAIRS[0]
    field = "prompt" if kind == "plain" else "instruction"
    row, _ = read_pair(Record({field: prompt, "chosen": text, "rejected": "no"}, "a:1"))
    assert isinstance(row, Pair)
    assert encoder.style(row.chosen).kind == kind
    found = encoder.encode(answered(prompt, text, Style(kind), "an answer"))
    assert found.input_ids == encoder.encode(row.chosen).input_ids


def test_a_run_scores_texts_and_files(model_folder, tmp_path, peftkit):
    file = write_rows(tmp_path / "train.jsonl")
    told = sections(tmp_path, model_folder, file, "reward")
    train = {"max_steps": 15, "batch_size": 5, "learning_rate": 0.02}
    result = finished(told, data={"eval": file}, train=train)
    assert {"accuracy", "margin"} <= result.of_kind(StepDone)[-1].figures.keys()
    opened = open_adapter(tmp_path / "run")
    found = evaluate(opened.base, file, task=opened.task)
    assert found["accuracy"] == 1.0
    assert found["loss"] == pytest.approx(result.metrics["eval_loss"], abs=1e-4)
    prompt, chosen, rejected = PAIRS[0]
    good, bad = predict(opened, [(prompt, chosen), (prompt, rejected)])
    assert good["score"] > bad["score"]
    texts = write(
        tmp_path / "b.jsonl",
        [{"prompt": prompt, "completion": text, "id": n} for n, text in enumerate(PAIRS[0][1:])],
    )
    rows = predict_file(opened, texts)
    assert [row["score"] for row in rows] == pytest.approx([good["score"], bad["score"]], abs=1e-5)
    assert rows[0]["id"] == 0
    scored = tmp_path / "scored.jsonl"
    peftkit("predict", str(tmp_path / "run"), "--data", texts, "--out", str(scored))
    lines = [json.loads(line) for line in scored.read_text().splitlines()]
    assert [line["score"] for line in lines] == pytest.approx([row["score"] for row in rows])
    (tmp_path / "b.jsonl").write_text(scored.read_text())
    with pytest.raises(DataError, match="a field 'score' already"):
        predict_file(opened, texts)


def test_invalid_and_too_long_pairs_are_named(model_folder, tmp_path):
    rows = [{"prompt": "a ", "chosen": "b", "rejected": "c"}] * 9
    long = {"prompt": "a ", "chosen": "the dog " * 60, "rejected": "c"}
    _, _, kept = reward(model_folder, write(tmp_path / "a.jsonl", [*rows, long]))
    assert len(kept) == 9
    with pytest.raises(DataError, match=r"a\.jsonl:1, .*a\.jsonl:2"):
        reward(model_folder, write(tmp_path / "a.jsonl", [long, long, *rows[:5]]))
    with pytest.raises(DataError, match=r"a\.jsonl:2: rejected: missing"):
        reward(model_folder, write(tmp_path / "a.jsonl", [rows[0], {"prompt": "a", "chosen": "b"}]))


def test_an_sft_adapter_starts_a_reward_model(tmp_path, model_folder):
    file = write_rows(tmp_path / "train.jsonl")
    told = sections(tmp_path, model_folder, file, "preference", loss="orpo")
    first = finished(told, train={"max_steps": 2, "batch_size": 2})
    told |= {"task": {"type": "reward"}, "method": {"start_from": str(first.folder)}}
    train = {"output_dir": str(tmp_path / "second"), "max_steps": 2, "batch_size": 2}
    opened = open_adapter(finished(told, train=train).folder)
    assert any(path.endswith("score") for path in opened.adapter.full)
    assert predict(opened, ["the dog"])[0]["score"] != 0
