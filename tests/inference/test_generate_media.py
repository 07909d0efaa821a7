"""From rows with media to an adapter that answers about them: trained, resumed, asked, merged."""

import io
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from PIL import Image

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.data.media.files import Audio, Media, Picture
from peftkit.errors import AdapterError, DataError
from peftkit.evaluation.drift import Drift
from peftkit.evaluation.evaluate import evaluate
from peftkit.evaluation.predict import generate_with_media, media_task
from peftkit.events import EvalDone, Event, RunStarted, Sampled
from peftkit.formats.exchange import export_adapter
from peftkit.formats.open_adapter import open_adapter
from peftkit.inference.bank import open_bank
from peftkit.merging.merge import merge
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from peftkit.settings import BaseConfig, DataConfig, DriftConfig, TrainConfig
from peftkit.tasks.media.media_text import ImageTextConfig, MediaPrompt
from peftkit.train.loop import fit
from peftkit_cli import app
from tests.helpers.folders import write_rows
from tests.helpers.listening import (
    FAMILIES,
    HEARING,
    model_of,
    processor_of,
    task_of,
    write_sound_rows,
)
from tests.helpers.memory import limit_memory
from tests.helpers.speech import encoded, tones
from tests.helpers.vision import QUESTIONS, dialog

PLAIN = ("llava", "qwen2_audio", "mllama", "paligemma")
"""Pictures as tokens, sounds, cross-attention, a prefix that attends in both directions; the other
families are trained in tests/tasks/test_media_text.py, and generate in slow tests."""
ANY_LENGTH = DataConfig(train="", max_length=None)


def colour(*rgb: int, side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, 8), rgb).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class Case:
    """What a model is to tell apart.

    Args:
        kind: Of media. files: By the word that each is to be called. sizes: As they are shown.
    """

    family: str
    kind: type[Media]
    files: Mapping[str, bytes]
    sizes: Mapping[str, str]

    def path(self, word: str) -> Path:
        return Path(f"{word}.{self.kind.name}")


CASES = {
    "llava": Case(
        "llava",
        Picture,
        {"red": colour(250, 10, 10, side=8), "blue": colour(10, 10, 250, side=9)},
        {"red": "8x8", "blue": "9x8"},
    ),
    "qwen2_audio": Case(
        "qwen2_audio",
        Audio,
        {"low": encoded(tones(300)), "high": encoded(tones(3000, seconds=0.2))},
        {"low": "0.10 s", "high": "0.20 s"},
    ),
}
SOUNDS = pytest.mark.parametrize("case", ["qwen2_audio"], indirect=True)
IMAGES_FIRST = pytest.mark.parametrize(
    "case", ["llava", pytest.param("qwen2_audio", marks=pytest.mark.slow)], indirect=True
)
IMAGES = pytest.mark.parametrize("case", ["llava"], indirect=True)


@cache
def _folder_of(name: str, place: str) -> Path:
    folder = Path(place) / name
    model_of(name).save_pretrained(folder)
    processor_of(name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def base_folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder_of(case.family, str(tmp_path_factory.mktemp("bases")))


@pytest.fixture(scope="module")
def data(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two colours, or tones, to tell apart, and a row without any."""
    folder = tmp_path_factory.mktemp("colours")
    rows: list[dict[str, Any]] = []
    for word, stored in case.files.items():
        (folder / case.path(word)).write_bytes(stored)
        asked = [
            {"type": case.kind.name, case.kind.name: str(case.path(word))},
            {"type": "text", "text": "what is it?"},
        ]
        rows.append({"messages": dialog(("user", asked), ("assistant", word))})
    rows.append({"messages": dialog(("user", "and then?"), ("assistant", "the fox"))})
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    return path


SAMPLED: dict[str, Any] = {"sample_every": 24, "eval_every": 24, "eval_generate": 3}


def settings_of(case: Case, base: Path, data: Path, out: Path, **train: Any) -> Recipe:
    given = {"max_steps": 24, "batch_size": 3, "learning_rate": 0.02, "save_every": 16}
    return Recipe(
        task=FAMILIES[case.family].config(),
        base=BaseConfig(model=str(base), dtype="fp32"),
        method=LoRA(rank=4, targets=("attention", "ffn", "projector")),
        data=DataConfig(train=str(data), eval=str(data), max_length=256),
        train=TrainConfig(output_dir=out, **{**given, **train}),
    )


@pytest.fixture(scope="module")
def run_folder(
    case: Case, base_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An adapter that tells two colours, or tones, apart."""
    out = tmp_path_factory.mktemp("runs") / "colours"
    events: list[Event] = []
    settings = settings_of(case, base_folder, data, out, **SAMPLED)
    run_recipe(settings, on_event=events.append)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert "no packing or sharing" in started.paths
    samples = [event.samples for event in events if isinstance(event, Sampled)]
    assert [one.completion for one in samples[-1]] == [*case.files, "the fox"]
    return out


@pytest.mark.smoke
def test_two_are_told_apart(case, run_folder, data):
    opened = open_adapter(run_folder)
    metrics = evaluate(opened.base, data, task=opened.task, style=opened.style)
    assert metrics["exact_match"] == 1.0
    with opened.adapter.disabled():
        assert evaluate(opened.base, data, task=opened.task)["exact_match"] == 0.0
    for word in case.files:
        medium = case.kind(data.parent / case.path(word), word)
        assert generate_with_media(opened, "what is it?", [medium]) == word
    assert generate_with_media(opened, "and then?") == "the fox"


def test_drift_is_measured_on_prompts_without_media(case, base_folder, data, tmp_path):
    events: list[Event] = []
    train = {"max_steps": 2, "drift": {}, "eval_before": True, "eval_every": 2, "save_every": None}
    run_recipe(settings_of(case, base_folder, data, tmp_path, **train), on_event=events.append)
    first, last = [event.metrics for event in events if isinstance(event, EvalDone)]
    assert (first["drift"], first["drift_95"], first["drift_same"]) == (0.0, 0.0, 1.0)
    assert 0 < last["drift"] < last["drift_95"]
    opened = open_adapter(tmp_path)
    form = media_task(opened).prompt_format
    text = opened.base.tokenizer.decode(form.encode("Why is the sky blue?"))
    assert text == "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    again = Drift(
        opened.base.model,
        opened.base.tokenizer,
        opened.adapter.disabled,
        DriftConfig(),
        prompt_format=form,
    )
    assert again.measure()["drift"] == pytest.approx(last["drift"], rel=1e-3)


@IMAGES_FIRST
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_peft_reads_it_and_merges(case, run_folder, data, tmp_path):
    opened = open_adapter(run_folder)
    task = FAMILIES[case.family].config().on(opened.base.model, opened.base.processor, ANY_LENGTH)
    row = task.load(str(data))[0]
    inputs = task.inputs(opened.base.model, task.collate([row]))
    with torch.no_grad():
        ours = opened.base.model(**inputs).logits
        theirs = peft.PeftModel.from_pretrained(model_of(case.family), run_folder)(**inputs).logits
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-4)
        merge(run_folder, tmp_path / "merged", dtype="fp32")
        purpose = FAMILIES[case.family].config().purpose
        merged = load_base(str(tmp_path / "merged"), dtype="fp32", purpose=purpose)
        torch.testing.assert_close(merged.model(**inputs).logits, ours, rtol=1e-4, atol=1e-3)
    assert merged.processor.chat_template == processor_of(case.family).chat_template


@SOUNDS
def test_a_resumed_run_ends_equal(case, base_folder, data, run_folder, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(run_folder, half)
    shutil.rmtree(half / "checkpoints" / "step-24")
    (half / "adapter_model.safetensors").unlink()
    run_recipe(settings_of(case, base_folder, data, half, **SAMPLED), resume=True)
    whole, again = ((p / "adapter_model.safetensors").read_bytes() for p in (run_folder, half))
    assert whole == again


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in PLAIN else pytest.mark.slow) for n in FAMILIES],
)
def test_generation_is_the_likeliest_token_again_and_again(name, tmp_path):
    """Several prompts at once, cached, give what whole forward passes of each alone do."""
    model = model_of(name)
    task = task_of(name, model)
    rows = [*QUESTIONS, {"prompt": "what is it?", "completion": "the fox", "image": "b.png"}]
    if FAMILIES[name].has_template:
        rows = [
            {"messages": dialog(("user", row["prompt"]), ("assistant", "the fox"))}
            | (
                {"audio": row["image"].replace("png", "wav")}
                if name in HEARING
                else {"image": row["image"]}
            )
            for row in rows
        ]
    loaded = task.load(str(write_sound_rows(tmp_path, rows)))
    prompts = [MediaPrompt(row.prompt, row.media) for row in loaded]
    answers = task.complete(model, prompts, max_new_tokens=4)
    for row, prompt, answer in zip(loaded, prompts, answers, strict=True):
        inputs = task.generation_inputs(model, [prompt])
        ids, new = inputs["input_ids"], []
        while len(new) < 4:
            grown = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for key, value in inputs.items():
                if key not in grown and value.shape[:2] == inputs["input_ids"].shape:
                    more = value[:, -1:].repeat(1, len(new), *[1] * (value.ndim - 2))
                    grown[key] = torch.cat([value, more], 1)
            with torch.no_grad():
                logits = model(**{**inputs, **grown}, use_cache=False).logits
            new.append(int(logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([new[-1:]])], 1)
        assert answer == new[: len(answer)]
        assert len(answer) == 4 or new[len(answer)] in task.encoder.stop_ids(task.rows.prompt_style)
        assert row.media
    told: list[int] = []
    limit_memory(model, 1)
    assert task.complete(model, prompts, max_new_tokens=4, on_fewer=told.append) == answers
    assert told[-1] == 1


@IMAGES
@pytest.mark.smoke
def test_what_cannot_be_asked_is_refused(run_folder, tmp_path):
    opened = open_adapter(run_folder)
    with pytest.raises(DataError, match=r"Cannot decode the image of gone(.|\n)*gone.png"):
        generate_with_media(opened, "what?", [Picture(tmp_path / "gone.png", "gone")])
    with pytest.raises(DataError, match=r"the audio clip of a.wav(.|\n)*not support audio clips"):
        generate_with_media(opened, "what?", [Audio(tmp_path / "a.wav", "a.wav")])
    with pytest.raises(AdapterError, match=r"runs\d*/colours(.|\n)*image_text"):
        open_bank({"a": run_folder})
    for to in ("gguf", "mlx"):
        with pytest.raises(AdapterError, match=rf"to {to}(.|\n)*peftkit merge"):
            export_adapter(run_folder, tmp_path / to, to=to)  # type: ignore[arg-type]


def say(*lines: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    run(*argv)


def run(*argv: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as done:
            app.main(list(argv))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.value.code == 0


@IMAGES_FIRST
def test_the_command_line_shows_media(case, run_folder, data, capsys, monkeypatch):
    kind, one, two = case.kind.name, *(str(data.parent / case.path(word)) for word in case.files)
    for word, path in zip(case.files, (one, two), strict=True):
        run("generate", str(run_folder), f"--{kind}", path, "--prompt", "what is it?")
        assert capsys.readouterr().out == f"{word}\n"
    say(
        f"/{kind} {one}",
        "what is it?",
        "/reset",
        f"/{kind} {two}",
        "what is it?",
        f"/{kind} gone.file",
        "/video gone.mp4",
        argv=["chat", str(run_folder)],
        monkeypatch=monkeypatch,
    )
    output = capsys.readouterr()
    assert output.out.split() == [*case.files]
    assert all(f"({size}) to the next message" in output.err for size in case.sizes.values())
    assert "gone.file" in output.err
    assert "The base does not support videos" in output.err


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "mllama", "gemma3"])
def test_a_folder_has_its_processor_and_16_bit_towers(name, tmp_path):
    folder = _folder_of(name, str(tmp_path))
    purpose = ImageTextConfig().purpose
    base = load_base(str(folder), dtype="fp32", quantize="nf4", purpose=purpose)
    assert type(base.processor).__name__ == type(processor_of(name)).__name__
    assert base.tokenizer is base.processor.tokenizer
    whys = {row.why for row in base.audit.rows if row.kind == "linear layers"}
    assert "vision side: base.quantize_towers" in whys
    dtypes = {row.stored for row in base.audit.rows if "vision side" in row.why}
    assert dtypes == {"float32"}
    if name == "qwen2_5_vl":
        packed = load_base(
            str(folder), dtype="fp32", quantize="nf4", quantize_towers=True, purpose=purpose
        )
        assert not [row for row in packed.audit.rows if "quantize_towers" in row.why]
        assert packed.audit.num_bytes < base.audit.num_bytes
    base.processor.save_pretrained(tmp_path / "again")
    files = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert "processor_config.json" in files


def test_mllama_learns_by_its_cross_attention_alone(tmp_path):
    model = model_of("mllama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = task_of("mllama", model)
    row = {"messages": dialog(("user", "<image>what?"), ("assistant", "fox dog")), "image": "a.png"}
    rows = task.load(str(write_sound_rows(tmp_path, [row, {**row, "image": "b.png"}])))
    adapter = attach(model, LoRA(rank=4, targets=("cross_attention",)))
    assert all(".cross_attn." in path for path in adapter.modules)
    first = task.metrics(model, rows)["loss"]
    settings = TrainConfig(output_dir=tmp_path / "run", max_steps=20, learning_rate=0.02)
    fit(model, task, rows, config=settings)
    assert task.metrics(model, rows)["loss"] < first / 2
    adapter.detach()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@SOUNDS
def test_inspect_audio_models(base_folder, capsys):
    run("inspect", str(base_folder))
    assert "audio_q" in capsys.readouterr().out
