"""Encoder and decoder: the loss is the definition's, the answers are greedy, the score is ROUGE."""

import copy
import json
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.errors import BaseError, ConfigError, DataError
from peftkit.evaluation.evaluate import evaluate
from peftkit.events import Event, Table
from peftkit.formats.open_adapter import open_adapter
from peftkit.methods.lora import LoRA
from peftkit.run import check as check_recipe
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.metrics import rouge_l
from peftkit.tasks.text.seq2seq import Seq2Seq, Seq2SeqConfig
from peftkit.train.loop import fit
from tests.helpers.adapters import gradients
from tests.helpers.families import ARCHITECTURES, EOS, PAD
from tests.helpers.finished import finished, recipe, sections
from tests.helpers.folders import write_rows as write
from tests.helpers.memory import limit_memory, use_small_chunks

Tokenizer = PreTrainedTokenizerFast
ROWS = [
    {"prompt": "the quick brown fox", "completion": "the fox"},
    {"prompt": "what is the answer? what?", "completion": "the answer is in the question"},
    {"prompt": "pizza", "completion": "olives and cheese, and then the other dog"},
]


def task_on(
    model: Any, tokenizer: Any, data: dict[str, Any] | None = None, **settings: Any
) -> Seq2Seq:
    config = DataConfig(**{"train": "", "max_length": 32, **(data or {})})
    return Seq2SeqConfig(**settings).on(model, tokenizer, config)


def build(name: str) -> PreTrainedModel:
    model = ARCHITECTURES[name]().eval()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model


def by_definition(model: Any, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The model's own loss, a mean, for the labels (B, T) with -100 where there is padding."""
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels)
    return out.loss * (labels != -100).sum()


@pytest.mark.parametrize(
    ("name", "chunked"), [("t5", False), ("t5_gated", True), ("bart", True), ("pegasus", False)]
)
def test_loss_and_gradients_are_the_models_own(name, chunked, tmp_path, tokenizer, monkeypatch):
    if chunked:
        use_small_chunks(monkeypatch)
    model = build(name)
    task = task_on(model, tokenizer)
    rows = task.load(write(tmp_path / "a.jsonl", ROWS))
    batch = task.collate(rows)
    width = batch["decoder_input_ids"].shape[1]
    labels = torch.tensor([[*r.labels] + [-100] * (width - len(r.labels)) for r in rows])
    with task.training(model):
        loss = task.loss(model, batch)[0]
        found = gradients(model, loss)
    wanted = by_definition(model, batch, labels)
    expected = gradients(model, wanted)
    assert task.num_targets(batch) == sum(len(row.labels) for row in rows)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():  # sums of hundreds of terms in another order
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=2e-4, msg=key)


def test_a_target_ends_and_its_decoder_begins(tmp_path, tokenizer):
    task = task_on(build("t5"), tokenizer, prefix="say: ")
    row = task.load(write(tmp_path / "a.jsonl", ROWS[:1]))[0]
    assert list(row.input_ids) == tokenizer("say: the quick brown fox")["input_ids"]
    assert list(row.labels) == [*tokenizer("the fox")["input_ids"], EOS]
    assert task.collate([row])["decoder_input_ids"].tolist() == [[PAD, *row.labels[:-1]]]
    assert task.spans(row) == [
        ("source", "say: the quick brown fox"),
        ("learnt", "the fox<|im_end|>"),
    ]


def test_what_is_cut_and_dropped_is_counted(tmp_path, tokenizer):
    events: list[Event] = []
    config = DataConfig(train="", max_length=8, max_dropped=0.5)
    rows = [
        {"instruction": "fox " * 20, "output": "a"},
        {"instruction": "a", "output": "fox " * 20},
        {"instruction": "a", "output": " "},
    ]
    where = write(tmp_path / "a.jsonl", rows)
    task = Seq2SeqConfig(max_target_length=5).on(
        build("t5"), tokenizer, config, on_event=events.append
    )
    kept = task.load(where)
    assert [(len(r.input_ids), len(r.labels)) for r in kept] == [(8, 2), (1, 5)]
    (table,) = [event for event in events if isinstance(event, Table)]
    counts = {row[0]: row[1] for row in table.rows}
    assert counts["sources cut at 8 tokens"] == counts["targets cut at 5 tokens"] == "1"
    assert counts["dropped: source or target is empty"] == f"1 ({where}:3)"
    words = r"(?s)1 of 3 rows.*max_dropped \(10%\).*Source or target is empty: 1 \(.*a.jsonl:3\)"
    with pytest.raises(DataError, match=words):
        task_on(build("t5"), tokenizer).load(where)


def test_a_source_is_as_long_as_the_model_reads(tokenizer):
    assert task_on(build("t5"), tokenizer, {"max_length": None}).max_source == 256  # tokenizer's
    endless = copy.deepcopy(tokenizer)
    endless.model_max_length = int(1e30)
    assert task_on(build("t5"), endless, {"max_length": None}).max_source > 100_000
    assert task_on(build("bart"), endless, {"max_length": None}).max_source == 1024


def test_fields_can_be_named(tmp_path, tokenizer):
    rows = [{"document": "the fox", "summary": "fox", "id": 1}]
    where = write(tmp_path / "a.jsonl", rows)
    task = task_on(build("t5"), tokenizer, source="document", target="summary")
    assert task.load(where)[0].target == "fox"
    other = task_on(build("t5"), tokenizer, source="article", target="summary")
    with pytest.raises(DataError, match=r"a.jsonl:1 lacks 'article'.*document, summary, id"):
        other.load(where)
    with pytest.raises(ConfigError, match="together or not at all"):
        Seq2SeqConfig(source="document")


def test_texts_and_conversations_are_no_pairs(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"a.jsonl:1(.|\n)*It is a text"):
        task_on(build("t5"), tokenizer).load(write(tmp_path / "a.jsonl", [{"text": "the fox"}]))


def test_a_decoder_is_no_base_for_seq2seq(model_folder, llama, tokenizer):
    with pytest.raises(BaseError, match="is not a seq2seq model") as caught:
        load_base(str(model_folder), purpose=Seq2SeqConfig().purpose)
    assert caught.value.exit_code == 2
    with pytest.raises(BaseError, match="not an encoder-decoder"):
        task_on(llama, tokenizer)


def test_a_model_must_say_what_its_decoder_starts_with(tokenizer):
    model = build("t5")
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(BaseError, match="decoder_start_token_id"):
        task_on(model, tokenizer)


def test_batches_shrink_if_memory_runs_out(tmp_path, tokenizer):
    model = ARCHITECTURES["t5"]().eval()
    task = task_on(model, tokenizer)
    rows = task.load(write(tmp_path / "a.jsonl", ROWS))
    expected = task.answers(model, rows, max_new_tokens=6)
    limit_memory(model.get_encoder(), 1)
    told: list[int] = []
    assert task.answers(model, rows, max_new_tokens=6, on_fewer=told.append) == expected
    assert told[-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_generation_repeats_training(name, tmp_path, tokenizer):
    model = ARCHITECTURES[name]()
    attach(model, LoRA(rank=16, alpha=32, targets="all-linear"))
    task = task_on(model, tokenizer)
    rows = task.load(write(tmp_path / "a.jsonl", ROWS))
    settings = TrainConfig(
        output_dir=tmp_path / "run", max_steps=150, batch_size=4, learning_rate=0.01
    )
    fit(model, task, rows, (), settings)
    model.eval()
    own = model.generation_config
    found = task.metrics(model, rows)
    assert model.generation_config is own
    samples = task.answers(model, rows)
    assert [sample.completion for sample in samples] == [row["completion"] for row in ROWS]
    assert found["exact_match"] == found["rouge_l"] == 1.0
    # not near 0: the last norm is not trained, and bounds the logits
    assert 0 < found["loss"] < 2
    assert found["num_targets"] == sum(len(row.labels) for row in rows)


def test_a_recipe_trains_and_evaluates(tmp_path, tokenizer):
    build("t5").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    where = write(tmp_path / "a.jsonl", ROWS)
    told = sections(tmp_path, tmp_path / "base", where, "seq2seq", max_target_length=16)
    told["data"] |= {"eval": where, "max_length": 32}
    told["method"]["targets"] = ["q", "cross_v"]
    done = finished(told, base={"quantize": "nf4"}, train={"max_steps": 4, "learning_rate": 0.01})
    opened = open_adapter(done.folder)
    assert opened.task == Seq2SeqConfig(max_target_length=16)
    found = evaluate(opened.base, where, task=opened.task)
    for name in ("loss", "perplexity"):  # of rows that are padded here, and were not there
        assert found[name] == pytest.approx(done.metrics[f"eval_{name}"], rel=1e-3)
    assert {"exact_match", "rouge_l"} < found.keys()
    fields = json.loads((done.folder / "adapter_config.json").read_text())
    assert fields["task_type"] == "SEQ_2_SEQ_LM"
    shown: list[Event] = []
    check_recipe(recipe(told), on_event=shown.append)
    tables = [event for event in shown if isinstance(event, Table)]
    assert ("learnt", "the fox<|im_end|>") in [row for table in tables for row in table.rows]


def test_rouge_l_is_the_packages():
    from rouge_score.rouge_scorer import RougeScorer  # takes a second: not in each worker

    rng, scorer = random.Random(0), RougeScorer(["rougeL"], use_stemmer=False)
    words = ["the", "fox", "Dog,", "it's", "3.5", "--", "over", "a_b"]
    for _ in range(100):
        text, reference = (" ".join(rng.choices(words, k=rng.randint(0, 12))) for _ in "ab")
        wanted = scorer.score(reference, text)["rougeL"].fmeasure
        assert rouge_l(text, reference) == pytest.approx(wanted, abs=1e-12)
    assert rouge_l("ÉTÉ chaud", "l'été") == pytest.approx(0.5)  # the package would find nothing
