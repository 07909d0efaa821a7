"""Transcription: labels, loss and gradients are transformers' own; runs save, merge and measure."""

import copy
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import jiwer
import numpy as np
import peft
import pytest
import soundfile
import torch
import transformers
from typer.testing import CliRunner

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.data.media.files import Audio
from peftkit.errors import BaseError, DataError
from peftkit.evaluation.evaluate import evaluate
from peftkit.events import Notice
from peftkit.formats.open_adapter import open_adapter
from peftkit.merging.merge import merge
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig
from peftkit.tasks.media.transcription import Transcription, TranscriptionConfig
from peftkit.tasks.metrics import error_rates
from peftkit_cli.app import app
from tests.helpers.families import ARCHITECTURES
from tests.helpers.finished import finished, sections
from tests.helpers.folders import write_rows
from tests.helpers.speech import RATE, SEQ2SEQ, encoded, saved, tones, whisper, write_speech_rows

pytestmark = pytest.mark.filterwarnings(  # PEFT's own
    "ignore:.is_gradient_checkpointing.:FutureWarning"
)
KEPT = (
    *("is_multilingual", "lang_to_id", "task_to_id", "no_timestamps_token_id"),
    *("eos_token_id", "pad_token_id", "decoder_start_token_id"),
)
"""Of Whisper's settings of generation: no more are needed."""
ROWS = [
    {"audio": [440.0, 880.0], "text": "the answer"},
    {"audio": [300.0], "text": "the quick brown fox"},
    {"audio": [700.0, 500.0, 600.0], "text": "dog"},
]
ENGLISH = {"language": "english"}


def task_on(made: tuple[Any, Any], **settings: Any) -> Transcription:
    model, processor = made
    return TranscriptionConfig(**settings).on(model, processor, DataConfig(train=""))  # type: ignore[return-value]


def settings_of(name: str) -> dict[str, Any]:
    return ENGLISH if name == "whisper" else {}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_speech_rows(tmp_path / "data", ROWS)


def recipes_labels(processor: Any, texts: Sequence[str], start: int) -> torch.Tensor:
    """Labels as the recipe of transformers makes them: its tokenizer pads, its collator cuts."""
    made = processor.tokenizer(list(texts), padding=True, return_tensors="pt")
    labels = made["input_ids"].masked_fill(made["attention_mask"].ne(1), -100)
    return labels[:, 1:] if bool((labels[:, 0] == start).all()) else labels


def test_labels_are_those_of_transformers_own_recipe(rows):
    model, processor = whisper()
    task = task_on((model, processor), **ENGLISH)
    read = task.load(str(rows))
    processor.tokenizer.set_prefix_tokens(language="english", task="transcribe")
    start = model.config.decoder_start_token_id
    wanted = recipes_labels(processor, [row["text"] for row in ROWS], start)
    assert [list(row.labels) for row in read] == [
        [token for token in line if token != -100] for line in wanted.tolist()
    ]
    batch = task.collate(read)
    shifted = transformers.models.whisper.modeling_whisper.shift_tokens_right(
        wanted, model.config.pad_token_id, start
    )
    width = shifted.shape[1]  # ours is rounded up
    learnt = wanted != -100
    assert torch.equal(batch["decoder_input_ids"][:, :width][learnt], shifted[learnt])
    assert batch["targets"].tolist() == wanted[learnt].tolist()
    assert task.spans(read[0]) == [
        ("audio", "0.20 s at 16,000 Hz"),
        ("start", "<|startoftranscript|>"),
        ("learnt", "<|en|>"),
        ("learnt", "<|transcribe|>"),
        ("learnt", "<|notimestamps|>"),
        ("learnt", "the answer<|endoftext|>"),
    ]


def test_a_row_names_its_own_language_and_task(tmp_path):
    told = [{**ROWS[0], "language": "de", "task": "translate"}, ROWS[1]]
    path = write_speech_rows(tmp_path, told)
    task = task_on(whisper(), **ENGLISH)
    first, second = task.load(str(path))
    assert [text for _, text in task.spans(first)][2:4] == ["<|de|>", "<|translate|>"]
    assert [text for _, text in task.spans(second)][2:4] == ["<|en|>", "<|transcribe|>"]
    with pytest.raises(DataError, match=r"rows.jsonl:2: it has no language(.|\n)*task.language"):
        task_on(whisper()).load(str(path))
    with pytest.raises(DataError, match=r"task.language(.|\n)*klingon"):
        task_on(whisper(), language="klingon")


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
def test_formats_rates_and_channels_are_heard_alike(kind):
    there = tones(440.0, seconds=0.5, rate=44_100)
    stereo = np.stack([there, there], axis=1)
    heard = Audio(encoded(stereo, 44_100, kind), "a:1").decode(RATE, 2.0)
    wanted = tones(440.0, seconds=0.5)
    middle = slice(2_000, 6_000)
    spectrum = [np.abs(np.fft.rfft(one[middle])) for one in (heard, wanted)]
    assert spectrum[0].argmax() == spectrum[1].argmax()
    assert abs(len(heard) - len(wanted)) < RATE // 10  # mp3 pads


def _eight_channels() -> bytes:
    return encoded(np.stack([tones(440.0, rate=192_000)] * 8, axis=1), 192_000)


def _an_hour() -> bytes:
    return encoded(np.ones(3600 * 1_000, dtype="float32"), 1_000, "flac")


def _no_numbers() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(99, np.nan), RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.mark.parametrize(
    ("audio", "text", "match"),
    [
        (lambda: encoded(np.zeros(1_000, dtype="float32")), "a", "Silent or empty audio: 1"),
        (lambda: encoded(np.zeros(0, dtype="float32")), "a", "Silent or empty audio: 1"),
        (lambda: b"this is a text" * 100, "a", r"a.wav(.|\n)*Format not recognised"),
        (lambda: b"", "a", r"a.wav"),
        (lambda: encoded(tones(440.0), kind="mp3")[:700], "a", "no audio that can be decoded"),
        (_eight_channels, "a", r"8 channels, more than 2"),
        (_an_hour, "a", r"Audio longer than 1 s: 1"),
        (_no_numbers, "a", "not finite"),
        (lambda: encoded(tones(440.0)), "  ", "No text: 1"),
        (lambda: encoded(tones(440.0)), "a <|0.00|> b", r"text(.|\n)*<\|0.00\|>"),
        (lambda: encoded(tones(440.0)), "fox " * 80, "Texts longer than 64 tokens: 1"),
    ],
)
def test_unreadable_audio_is_an_error(audio, text, match, tmp_path):
    (tmp_path / "a.wav").write_bytes(audio())
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"audio": "a.wav", "text": text}) + "\n")
    with pytest.raises(DataError, match=match):
        task_on(whisper(), **ENGLISH).load(str(path))


def test_what_is_no_sound_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    for value, match in (
        ("gone.wav", r"rows.jsonl:1(.|\n)*gone.wav"),
        ("https://example.org/a.wav", "nothing is fetched"),
        (3, r"rows.jsonl:1: audio: expected a path"),
    ):
        path.write_text(json.dumps({"audio": value, "text": "a"}) + "\n")
        with pytest.raises(DataError, match=match):
            task_on(whisper(), **ENGLISH).load(str(path))
    path.write_text('{"sound": "a.wav", "text": "a"}\n')
    with pytest.raises(DataError, match=r"audio: missing"):
        task_on(whisper(), **ENGLISH).load(str(path))
    with pytest.raises(BaseError, match="not an encoder-decoder"):
        task_on((ARCHITECTURES["llama"]().eval(), whisper()[1]))


def test_folders_and_data_sets_read_the_same(rows, tmp_path):
    task = task_on(whisper(), **ENGLISH)
    wanted = [(repr(row.clip), row.labels) for row in task.load(str(rows))]
    folder = rows.parent
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    columns = datasets.Features({"audio": datasets.Audio(), "text": datasets.Value("string")})
    stored = [
        {"audio": {"bytes": (folder / line["audio"]).read_bytes(), "path": None}}
        | {"text": line["text"]}
        for line in lines
    ]
    parquet = datasets.Dataset.from_list(stored).cast_column("audio", columns["audio"])
    parquet.to_parquet(str(tmp_path / "a.parquet"))
    rows.unlink()
    moved = [{"file_name": line["audio"], "text": line["text"]} for line in lines]
    write_rows(folder / "metadata.jsonl", moved)
    found = [task.load(str(folder)), task.load(str(tmp_path / "a.parquet"))]
    (folder / "metadata.jsonl").unlink()
    table = "".join(f"{line['file_name']},{line['text']}\n" for line in moved)
    (folder / "metadata.csv").write_text("file_name,text\n" + table)
    found.append(task.load(str(folder)))
    for read in found:
        assert [(repr(row.clip), row.labels) for row in read] == wanted


@pytest.mark.parametrize(
    ("name", "quantize"),
    [("whisper", "none"), ("moonshine", "none"), ("whisper", "nf4"), ("moonshine", "int8")],
)
def test_steps_match_a_plain_loop(name, quantize, rows, tmp_path):
    """PEFT's LoRA on the same base, transformers' own loss and AdamW: the same losses."""
    folder = saved(tmp_path / "base", SEQ2SEQ[name]())
    settings = settings_of(name)
    purpose = TranscriptionConfig().purpose
    base = load_base(str(folder), dtype="fp32", quantize=quantize, purpose=purpose)
    task = TranscriptionConfig(**settings).on(base.model, base.processor, DataConfig(train=""))
    read = task.load(str(rows))
    twin = copy.deepcopy(base.model)
    torch.manual_seed(0)
    adapter = attach(base.model, LoRA(rank=4, alpha=8, targets=("q", "v", "cross_q", "cross_v")))
    ours, states = [], {name: tensor.clone() for name, tensor in adapter.state().items()}
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2, weight_decay=0.0)
    batch = task.collate(read)
    for _ in range(10):
        loss = task.loss(base.model, batch)[0] / task.num_targets(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ours.append(float(loss.detach()))
    if quantize == "none":
        theirs = _plain_losses(twin, batch, states)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert ours[-1] < ours[0] - 0.05
    assert len(states) == 2 * 12  # q and v, in two layers of encoder, decoder and between them


def _plain_losses(
    model: Any, batch: dict[str, torch.Tensor], states: dict[str, torch.Tensor]
) -> list[float]:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
    )
    plain = peft.get_peft_model(model, config)
    started = {f"base_model.model.{name}": tensor for name, tensor in states.items()}
    assert set(peft.get_peft_model_state_dict(plain)) == set(started)
    peft.set_peft_model_state_dict(plain, started)
    labels = torch.full_like(batch["decoder_input_ids"], -100)
    labels.view(-1)[batch["target_index"]] = batch["targets"]
    heard = {n: batch[n] for n in batch if n.startswith("input") or n == "attention_mask"}
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(10):
        given = {**heard, "decoder_input_ids": batch["decoder_input_ids"]}
        loss = plain(**given, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.covers("peftkit")
def test_a_run_measures_saves_merges_and_opens_elsewhere(rows, tmp_path):
    base = saved(tmp_path / "base", whisper())
    told = sections(tmp_path, base, str(rows), "transcription", **ENGLISH)
    told["method"] |= {"rank": 8, "targets": "all-linear"}
    told["data"] = {"train": str(rows), "eval": str(rows)}
    train = {"max_steps": 30, "learning_rate": 1e-2, "eval_generate": 3}
    done = finished(told, train={**train, "eval_every": 30, "sample_every": 30})
    run, found = done.folder, done.metrics
    assert found["before_wer"] > found["eval_wer"] == 0.0
    assert found["eval_wer_normalized"] == found["eval_cer"] == 0.0
    notices = [event.text for event in done.of_kind(Notice)]
    assert any("reference: the answer | transcript: the answer" in text for text in notices)
    assert any("BasicTextNormalizer" in text for text in notices)

    opened = open_adapter(run)
    again = evaluate(opened.base, rows, task=opened.task)
    assert again["wer"] == 0.0

    model, processor = whisper()
    heard = tones(*ROWS[0]["audio"])
    features = processor.feature_extractor(heard, sampling_rate=RATE, return_tensors="pt")
    model.generation_config = transformers.GenerationConfig(
        **{n: getattr(model.generation_config, n) for n in KEPT}
    )
    theirs = peft.PeftModel.from_pretrained(model, run)
    ids = theirs.generate(features.input_features, language="english", task="transcribe")
    assert processor.tokenizer.decode(ids[0], skip_special_tokens=True).strip() == "the answer"

    asked = ["generate", str(run), "--audio", str(rows.parent / "rows.jsonl.0.wav")]
    assert CliRunner().invoke(app, asked).stdout.strip() == "the answer"

    merged = merge(run, tmp_path / "merged").folder
    hear = transformers.pipeline("automatic-speech-recognition", model=str(merged))
    assert (
        hear(heard.copy(), generate_kwargs={"max_new_tokens": 20})["text"].strip() == "the answer"
    )


def test_error_rates_are_those_of_all_texts_together():
    said, heard = ["a b c", "", "d"], ["a x c", "y", "d e f"]
    found = error_rates(said, heard)
    assert found == {
        "wer": jiwer.wer(["a b c", "d"], ["a x c", "d e f"]),
        "cer": jiwer.cer(["a b c", "d"], ["a x c", "d e f"]),
    }
    assert found["wer"] == pytest.approx(3 / 4)
    assert error_rates([" "], ["a"]) == {}
