"""CTC and classes of sounds: losses are transformers' own, lengths the model's."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from typer.testing import CliRunner

from peftkit.base.load import load_base
from peftkit.errors import DataError
from peftkit.evaluation.evaluate import evaluate
from peftkit.formats.open_adapter import open_adapter
from peftkit.merging.merge import merge
from peftkit.settings import DataConfig
from peftkit.tasks.media.ctc import CTC, CTCConfig
from peftkit.tasks.media.media_classification import AudioClassificationConfig
from peftkit.tasks.media.speech import ShortAudio
from peftkit_cli.app import app
from tests.helpers.finished import finished, sections
from tests.helpers.speech import (
    RATE,
    encoded,
    hears_frames,
    saved,
    tones,
    wav2vec2,
    write_speech_rows,
)

pytestmark = pytest.mark.filterwarnings(  # PEFT's own
    "ignore:.is_gradient_checkpointing.:FutureWarning"
)
ROWS = [
    {"audio": [440.0, 880.0, 440.0] * 2, "text": "one two"},
    {"audio": [300.0, 500.0] * 2, "text": "fox"},
    {"audio": [700.0, 500.0, 600.0, 300.0] * 2, "text": "good dogs"},
]
HEARS_FRAMES = ("Wav2Vec2Bert", "Parakeet", "Lasr")


def task_on(made: tuple[Any, Any], **settings: Any) -> CTC:
    return CTCConfig(**settings).on(*made, DataConfig(train=""))  # type: ignore[return-value]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_speech_rows(tmp_path / "data", ROWS)


def made_of(family: str) -> tuple[Any, Any]:
    if family in HEARS_FRAMES:
        return hears_frames(family)
    return wav2vec2(family=family, feat_extract_norm="layer", do_stable_layer_norm=True)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # WavLM's own
@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert", "WavLM", *HEARS_FRAMES])
def test_loss_and_gradients_are_the_models_own(family, rows):
    model, processor = made_of(family)
    task = task_on((model, processor))
    read = task.load(str(rows))
    batch = task.collate(read)
    width = max(len(row.labels) for row in read)
    labels = torch.tensor([[*row.labels, *[-100] * (width - len(row.labels))] for row in read])
    model.config.ctc_loss_reduction = "sum"
    heard = {name: batch[name] for name in (model.main_input_name, "attention_mask")}
    wanted = model(**heard, labels=labels).loss
    wanted.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with task.training(model):
        loss = task.loss(model, batch)[0]
        loss.backward()
    torch.testing.assert_close(loss, wanted)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=5e-4)
    assert task.num_targets(batch) == sum(len(row["text"]) for row in ROWS)
    assert task.spans(read[1]) == [
        ("audio", f"0.40 s at 16,000 Hz, {read[1].num_encoder_tokens} positions"),
        ("learnt", "f o x"),
    ]


@pytest.mark.parametrize("family", ["Wav2Vec2", *HEARS_FRAMES])
def test_padding_changes_no_loss(family, rows):
    model, processor = made_of(family)
    task = task_on((model, processor))
    read = task.load(str(rows))
    together = task.loss(model, task.collate(read))[0]
    alone = sum(task.loss(model, task.collate([row]))[0] for row in read)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert", "WavLM"])
def test_padding_changes_no_loss_where_norms_run_over_time(family, rows):
    model, processor = wav2vec2(family=family)
    assert model.config.feat_extract_norm == "group"
    processor.feature_extractor.return_attention_mask = False  # as wav2vec2-base has it
    task = task_on((model, processor))
    read = task.load(str(rows))
    losses = []
    for part in ([read[0]], [read[1]], [read[2]], list(read)):
        inputs = task.collate(part)
        loss = task.loss(model, inputs)[0]
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        losses.append((loss, [g for g in gradients if g is not None]))
    (*alone, (together, gradients)) = losses
    torch.testing.assert_close(together, sum(loss for loss, _ in alone), rtol=1e-4, atol=1e-3)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for found, *expected in zip(gradients, *(g for _, g in alone), strict=True):
        torch.testing.assert_close(found, sum(expected), rtol=1e-3, atol=1e-4 * largest)


def test_what_cannot_be_said_is_named(tmp_path):
    path = write_speech_rows(
        tmp_path, [{"audio": [440.0], "text": "FOX"}, {"audio": [440.0], "text": "a"}]
    )
    task = task_on(wav2vec2())
    with pytest.raises(DataError, match=r"rows.jsonl:1: its text(.|\n)*F O X(.|\n)*task.case"):
        task.load(str(path))
    assert task_on(wav2vec2(), case="lower").load(str(path))[0].labels == tuple(
        task.tokenizer("fox")["input_ids"]
    )
    path = write_speech_rows(tmp_path, [{"audio": [440.0], "text": "fox " * 40}])
    with pytest.raises(DataError, match="Texts longer than their audio"):
        task.load(str(path))


@pytest.mark.parametrize("family", ["Wav2Vec2", *HEARS_FRAMES])
def test_a_sound_too_short_for_its_model_is_told(family, tmp_path):
    (tmp_path / "a.wav").write_bytes(encoded(tones(440.0, seconds=0.003)))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"audio": "a.wav", "text": "a"}) + "\n")
    made = made_of(family)
    with pytest.raises(DataError, match=r"Audio that is too short: 1 \(.*rows.jsonl:1"):
        task_on(made).load(str(path))
    with pytest.raises(ShortAudio, match=r"a.wav(.|\n)*0.00 s"):
        task_on(made).transcribe(made[0], [tmp_path / "a.wav"])


@pytest.mark.parametrize(
    "family", ["Wav2Vec2", pytest.param("Parakeet", marks=pytest.mark.slow)]
)  # its norms are of batches
def test_a_new_vocabulary_trains_merges_and_opens(family, rows, tmp_path):
    made = made_of(family)
    settings = {"vocabulary": "data", "case": "upper"}
    told = sections(tmp_path, saved(tmp_path / "base", made), str(rows), "ctc", **settings)
    told["method"] |= {"rank": 8, "targets": "all-linear"}
    told["data"] = {"train": str(rows), "eval": str(rows)}
    result = finished(told, train={"max_steps": 25, "learning_rate": 1e-2})
    run = result.folder
    assert result.metrics["before_wer"] >= 1.0
    assert result.metrics["eval_loss"] < result.metrics["before_loss"] / 2
    opened = open_adapter(run)
    assert opened.task.tokens == ("<pad>", "<unk>", "|", *sorted(set("ONETWOFXGDS")))
    again = evaluate(opened.base, rows, task=opened.task)
    assert again["cer"] == result.metrics["eval_cer"]
    assert again["loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
    sound = rows.parent / "rows.jsonl.1.wav"
    said = CliRunner().invoke(app, ["generate", str(run), "--audio", str(sound)]).stdout.strip()
    merged = merge(run, tmp_path / "merged").folder
    hear = transformers.pipeline("automatic-speech-recognition", model=str(merged))
    heard = hear(tones(*ROWS[1]["audio"]))["text"]
    assert heard[: len(said)] == said  # the pipeline reads a position of Parakeet's padding too
    assert family == "Parakeet" or heard == said


def test_a_bases_own_vocabulary_and_head_are_gone_on_with(rows, tmp_path):
    base = saved(tmp_path / "base", wav2vec2())
    loaded = load_base(str(base), dtype="fp32", quantize="nf4", purpose=CTCConfig().purpose)
    assert loaded.head == ("lm_head",)
    task = CTCConfig().on(loaded.model, loaded.processor, DataConfig(train=""))
    found = task.metrics(loaded.model, task.load(str(rows)))
    assert found["loss"] > 0
    assert {"wer", "cer", "wer_normalized", "cer_normalized"} <= set(found)


def test_sounds_are_told_by_their_labels(tmp_path):
    folder, run = tmp_path / "data", tmp_path / "run"
    for name, hertz in (("high", 3000.0), ("low", 200.0)):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            sound = encoded(tones(hertz + 20 * number, seconds=0.15 + 0.05 * number))
            (folder / name / f"{number}.wav").write_bytes(sound)
    base = saved(
        tmp_path / "base", wav2vec2("ForSequenceClassification", feat_extract_norm="layer")
    )
    told = sections(tmp_path, base, str(folder), "audio_classification")
    told["data"] = {"train": str(folder), "eval": str(folder)}
    result = finished(told, train={"max_steps": 15, "learning_rate": 1e-2})
    assert result.metrics["eval_accuracy"] == 1.0
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"audio": "data/low/1.wav"}) + "\n")
    said = CliRunner().invoke(app, ["predict", str(run), "--data", str(rows)]).stdout
    assert next(iter(json.loads(said)["prediction"])) == "low"
    opened = open_adapter(run)
    task = opened.task.on(opened.base.model, opened.base.processor, DataConfig(train=""))
    batch = task.collate(task.load(str(folder)))
    model, _ = wav2vec2("ForSequenceClassification", feat_extract_norm="layer")
    heard = {name: batch[name] for name in ("input_values", "attention_mask")}
    theirs = peft.PeftModel.from_pretrained(model, run)
    with torch.no_grad():
        wanted = theirs(**heard).logits
    torch.testing.assert_close(task.logits(opened.base.model, batch), wanted, rtol=1e-4, atol=1e-4)
    assert batch["input_values"].shape[1] == round(0.25 * RATE)


@pytest.mark.parametrize("kind", ["a text", "nothing to hear"])
def test_a_sound_without_use_ends_the_reading(kind, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1.wav").write_bytes(
            b"not a sound" if kind == "a text" else encoded(0 * tones(440.0))
        )
    made = wav2vec2("ForSequenceClassification", num_labels=2)
    made[0].config.id2label = {0: "a", 1: "b"}
    task = AudioClassificationConfig().on(*made, DataConfig(train=""))
    with pytest.raises(DataError, match=r"data/a/1.wav"):
        task.load(str(tmp_path / "data"))
