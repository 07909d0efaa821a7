"""Masked language modelling: what is hidden, when it changes, and what the loss is of it."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from peftkit.errors import BaseError, ConfigError, DataError
from peftkit.evaluation.evaluate import evaluate
from peftkit.events import Event, StepDone, Table
from peftkit.formats.open_adapter import open_adapter
from peftkit.settings import DataConfig
from peftkit.tasks.text.masked_lm import MaskedLM, MaskedLMConfig
from tests.helpers.classifiers import framing_tokenizer
from tests.helpers.families import ARCHITECTURES, BOS, EOS, UNK
from tests.helpers.finished import WEIGHTS, Sections, finished, merged, sections
from tests.helpers.memory import use_small_chunks

Tokenizer = PreTrainedTokenizerFast
FAMILIES = ("bert", "roberta", "distilbert", "modernbert", "deberta_v2", "electra")
TEXTS = [
    "the quick brown fox jumps over the lazy dog and then the other dog",
    "what is the answer?",
    "user assistant system instruction input output prompt completion messages content",
    "a",
]


@pytest.fixture
def bert() -> Any:
    return ARCHITECTURES["bert"]().eval()


@pytest.fixture
def masking() -> Tokenizer:
    """The tokenizer of an encoder: it puts <s> and <|im_end|> around texts, and <unk> masks."""
    own = framing_tokenizer()
    own.mask_token = "<unk>"
    return own


def task_on(
    model: Any, tokenizer: Any, data: dict[str, Any] | None = None, **settings: Any
) -> MaskedLM:
    config = DataConfig(**{"train": "", "max_length": 64, **(data or {})})
    return MaskedLMConfig(**settings).on(model, tokenizer, config)


def write(folder: Path, texts: list[str]) -> str:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def unpadded(batch: Mapping[str, Tensor]) -> list[list[int]]:
    if "grid_tokens" in batch:  # all in one row, whose last token pads the grid
        ids, places = batch["input_ids"][0], batch["grid_tokens"]
        return [ids[row[row < len(ids) - 1]].tolist() for row in places]
    pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


@pytest.mark.parametrize(("name", "chunked"), [(f, n % 2 > 0) for n, f in enumerate(FAMILIES)])
def test_loss_and_gradients_are_the_definitions(name, chunked, tmp_path, masking, monkeypatch):
    if chunked:
        use_small_chunks(monkeypatch)
    model = ARCHITECTURES[name]().eval()
    task = task_on(model, masking)
    batch = task.collate(task.load(write(tmp_path, TEXTS)))
    with task.training(model):
        loss = task.loss(model, batch)[0]
        loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    rows = logits.flatten(0, 1)[batch["target_index"]]
    wanted = F.cross_entropy(rows, batch["targets"], reduction="sum")
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)
    for key, parameter in model.named_parameters():  # sums of many terms in another order
        if parameter.grad is not None:
            torch.testing.assert_close(found[key], parameter.grad, rtol=1e-3, atol=2e-4, msg=key)


def test_shares_are_those_asked_for(tmp_path, bert, masking):
    bert.train()
    task = task_on(bert, masking)
    rows = task.load(write(tmp_path, ["fox dog " * 12] * 400))
    batch = task.collate(rows)
    kinds: Counter[str] = Counter()
    places: Counter[int] = Counter()
    for ids, row in zip(unpadded(batch), rows, strict=True):
        changed = [n for n, (a, b) in enumerate(zip(ids, row.input_ids, strict=True)) if a != b]
        assert not {0, len(ids) - 1} & set(changed), "what the tokenizer puts around is hidden"
        kinds["mask"] += sum(ids[n] == UNK for n in changed)
        kinds["random"] += sum(ids[n] != UNK for n in changed)
        places.update(changed)
    maskable = len(rows[0].maskable)
    assert len(batch["targets"]) == 400 * round(0.15 * maskable)
    total = len(batch["targets"])
    # five standard deviations of the binomial
    assert kinds["mask"] / total == pytest.approx(0.8, abs=5 * (0.16 / total) ** 0.5)
    assert kinds["random"] / total == pytest.approx(0.1, abs=5 * (0.09 / total) ** 0.5)
    assert set(places) == set(rows[0].maskable), "some places are never hidden"


def test_targets_are_the_masked_tokens(tmp_path, bert, masking):
    task = task_on(bert, masking, as_mask=1.0, as_random=0.0)
    rows = task.load(write(tmp_path, TEXTS))
    batch = task.collate(rows)
    flat = batch["input_ids"].flatten()
    assert (flat[batch["target_index"]] == UNK).all()
    flat[batch["target_index"]] = batch["targets"]
    restored = unpadded({**batch, "input_ids": flat.view_as(batch["input_ids"])})
    assert restored == [list(row.input_ids) for row in rows]
    assert task.num_targets(task.collate(rows[3:])) == 1, "a short text teaches something too"


def test_training_masks_change_each_time(tmp_path, bert, masking):
    bert.train()
    task = task_on(bert, masking)
    rows = task.load(write(tmp_path, TEXTS))
    torch.manual_seed(1)
    once, twice = unpadded(task.collate(rows)), unpadded(task.collate(rows))
    assert once != twice
    torch.manual_seed(1)
    assert [ids for row in rows for ids in unpadded(task.collate([row]))] == once


def test_evaluation_masks_are_fixed(tmp_path, bert, masking):
    task = task_on(bert, masking)
    rows = task.load(write(tmp_path, TEXTS))
    before = torch.get_rng_state()
    once = unpadded(task.collate(rows))
    assert [ids for row in rows for ids in unpadded(task.collate([row]))] == once
    assert torch.equal(torch.get_rng_state(), before)
    pieces = task.spans(rows[0])
    assert sum(kind == "learnt" for kind, _ in pieces) >= 1
    assert "".join(text for _, text in pieces) == f"<s>{TEXTS[0]}<|im_end|>"


@pytest.fixture
def told(tmp_path: Path, masking: Tokenizer) -> Sections:
    """Return a recipe over a base whose dropout is on in training."""
    ARCHITECTURES["bert"]().save_pretrained(tmp_path / "base")
    masking.save_pretrained(tmp_path / "base")
    file = write(tmp_path, [text + " fox" * n for text in TEXTS for n in range(5)])
    told = sections(tmp_path, tmp_path / "base", file, "masked_lm")
    train = {"max_steps": 6, "batch_size": 4, "tokens_per_batch": None, "learning_rate": 0.01}
    changes = {"method": {"dropout": 0.2, "targets": "attention"}, "data": {"eval": file}}
    return merged(told, {**changes, "train": train})


@pytest.mark.covers("peftkit")
def test_a_resumed_run_is_equal_to_the_bit(told, tmp_path):
    done = finished(told, train={"save_every": 1, "eval_every": 2, "keep_checkpoints": 6})
    half = done.resumed(tmp_path / "half", "step-6", "step-5", "step-4")
    losses, again = ([step.loss for step in run.of_kind(StepDone)] for run in (done, half))
    assert again == losses[3:]
    assert (half.folder / WEIGHTS).read_bytes() == (done.folder / WEIGHTS).read_bytes()


def test_metrics_are_of_the_hidden_tokens(tmp_path, bert, masking):
    task = task_on(bert, masking, share=0.5)
    rows = task.load(write(tmp_path, TEXTS))
    batch = task.collate(rows)
    with torch.no_grad():
        logits = bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    chosen, targets = logits.flatten(0, 1)[batch["target_index"]], batch["targets"]
    found = task.metrics(bert, rows)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(chosen, targets)), rel=1e-5)
    assert found["perplexity"] == pytest.approx(2.718281828 ** found["loss"], rel=1e-5)
    assert found["num_targets"] == len(targets)
    # a head whose bias knows the answer most often asked for
    common = int(targets.mode().values)
    bert.get_output_embeddings().bias.data[common] = 1000
    right = int((targets == common).sum()) / len(targets)
    assert task.metrics(bert, rows)["accuracy"] == right > 0


def test_a_recipe_trains_and_evaluates(told):
    done = finished(told, base={"quantize": "nf4"})
    opened = open_adapter(done.folder)
    assert opened.task == MaskedLMConfig()
    found = evaluate(opened.base, told["data"]["eval"], task=opened.task)
    for name in ("loss", "perplexity"):
        assert found[name] == pytest.approx(done.metrics[f"eval_{name}"], rel=1e-4)
    fields = json.loads((done.folder / "adapter_config.json").read_text())
    assert fields["task_type"] is None


def test_long_texts_are_split_or_cut(tmp_path, bert, masking):
    where = write(tmp_path, ["abcdefghij" * 2])
    ids = masking("abcdefghij" * 2, add_special_tokens=False)["input_ids"]
    split = task_on(bert, masking, {"max_length": 10}).load(where)
    assert [len(row.input_ids) for row in split] == [10] * (len(ids) // 8) + [len(ids) % 8 + 2]
    assert [token for row in split for token in row.input_ids[1:-1]] == ids
    (cut,) = task_on(bert, masking, {"max_length": 10}, long_texts="cut").load(where)
    assert cut.input_ids == (BOS, *ids[:8], EOS)


def test_empty_texts_are_counted(tmp_path, bert, masking):
    where = write(tmp_path, ["the fox", "", "<s>"])
    events: list[Event] = []
    config = DataConfig(train="", max_length=64, max_dropped=0.7)
    task = MaskedLMConfig().on(bert, masking, config, on_event=events.append)
    assert [row.source for row in task.load(where)] == [f"{where}:1"]
    (table,) = [event for event in events if isinstance(event, Table)]
    assert ("dropped: no words", f"2 ({where}:2, {where}:3)") in table.rows
    with pytest.raises(DataError, match=r"2 of 3 rows.*max_dropped"):
        task_on(bert, masking).load(where)


def test_what_cannot_be_is_an_error(tmp_path, bert, masking):
    with pytest.raises(ConfigError, match="more than 1"):
        MaskedLMConfig(as_mask=0.8, as_random=0.3)
    with pytest.raises(DataError, match="puts 2 tokens around"):
        task_on(bert, masking, {"max_length": 2})
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}))
    with pytest.raises(DataError, match="format 'prompt_completion'"):
        task_on(bert, masking).load(str(path))


def test_a_tokenizer_without_a_mask_is_an_error(bert, tokenizer):
    with pytest.raises(BaseError, match="no mask token"):
        task_on(bert, tokenizer)
