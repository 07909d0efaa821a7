"""Conversations with media: what is learnt of them, on every family, against the plain way."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import torch.nn.functional as F
from torch import Tensor

from peftkit.adapter import attach
from peftkit.data.media.text import MediaRow
from peftkit.data.rows.lazy import fingerprint
from peftkit.errors import BaseError, DataError
from peftkit.events import Event, Table
from peftkit.forward.probes import check_causal_answer
from peftkit.methods.lora import LoRA
from peftkit.quant.quantize import quantize_model, tower_paths
from peftkit.settings import DataConfig
from peftkit.tasks.batches import split_micro_batches
from peftkit.tasks.media.media_text import AudioTextConfig, ImageTextConfig, MediaText
from tests.helpers import vision
from tests.helpers.listening import (
    EACH,
    FAMILIES,
    HEARING,
    model_of,
    processor_of,
    task_of,
    write_sound_rows,
)
from tests.helpers.speech import encoded, tones
from tests.helpers.vision import ANSWERS, dialog, picture

ANY_LENGTH = DataConfig(train="", max_length=None)
CHATTING = [name for name, family in FAMILIES.items() if family.has_template]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def rows_of(task: MediaText, name: str, folder: Path) -> list[MediaRow]:
    return task.load(str(write_sound_rows(folder, FAMILIES[name].examples())))


def _image_id(task: MediaText) -> int:
    (found,) = task.encoder.media_processor.media_ids
    return found


def images_of(row: MediaRow) -> list[Any]:
    sizes = {"9x12": picture(), "20x9": picture(size=(20, 9))}
    return [sizes[size] for size in row.sizes if size in sizes]


def sounds_of(row: MediaRow) -> list[Any]:
    paths = [one.data for one in row.media if one.kind == "audio clip"]
    return [soundfile.read(path, dtype="float32")[0] for path in paths]


def plain(name: str, rows: Sequence[MediaRow]) -> tuple[dict[str, Tensor], Tensor]:
    """Return what the processor makes of rows by itself, and our labels beside its tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PaliGemma's use of numpy
        made = _processed(name, rows)
    labels = torch.full(made["input_ids"].shape, -100)
    for number, row in enumerate(rows):
        labels[number, : len(row.labels)] = torch.tensor(row.labels)
    return {key: value for key, value in made.items() if key != "labels"}, labels


def _processed(name: str, rows: Sequence[MediaRow]) -> Any:
    images = [images_of(row) for row in rows]
    sounds = [sound for row in rows for sound in sounds_of(row)]
    suffix = {} if FAMILIES[name].has_template else {"suffix": [row.suffix for row in rows]}
    return processor_of(name)(
        text=[row.text for row in rows],
        text_kwargs={"padding": True, "padding_side": "right", "add_special_tokens": False},
        return_tensors="pt",
        **({"images": images} if any(images) else {}),
        **({"audio": sounds, "sampling_rate": 16_000} if sounds else {}),
        **suffix,
    )


@pytest.mark.parametrize("name", EACH)
def test_answers_alone_are_learnt_token_by_token(name, folder):
    task = task_of(name)
    rows = rows_of(task, name, folder)
    decode = task.tokenizer.decode
    answers = ANSWERS if FAMILIES[name].has_template else [["the fox"], ["the other dog over"]]
    for row, answer in zip(rows, answers, strict=True):
        made, _ = plain(name, [row])
        ids = made["input_ids"][0].tolist()
        assert list(row.input_ids) == ids[: len(row.input_ids)]  # what follows is never learnt
        expected, text = [-100] * len(row.input_ids), decode(row.input_ids)
        tokens = task.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert tokens["input_ids"] == list(row.input_ids)
        at = 0
        for part in answer:
            start = text.index(f"{part}<|im_end|>", at)
            at = start + len(f"{part}<|im_end|>")
            for number, (begin, _) in enumerate(tokens["offset_mapping"]):
                if start <= begin < at:
                    expected[number] = row.input_ids[number]
        assert list(row.labels) == expected
        assert not set(row.labels) & task.encoder.media_processor.media_ids


IN_A_PLAIN_LOOP = ("llava", "qwen2_5_vl", "paligemma", "mllama", "qwen2_audio")
"""One family for each kind of input; the others' layouts are compared row by row."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_A_PLAIN_LOOP else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_loop(name, folder):
    # of Gemma 4 with random weights each step makes differences of rounding ten times larger
    steps = {"qwen2_audio": 10, "gemma4_hearing": 1}.get(name, 2)
    _compare(name, model_of(name), model_of(name), folder, steps)


@pytest.mark.parametrize("name", ["qwen2_audio", "mllama"])
def test_in_four_bits_too(name, folder):
    models = [model_of(name), model_of(name)]
    for model in models:
        quantize_model(model, "nf4", keep=tower_paths(model))
    _compare(name, *models, folder)


def _compare(name: str, ours: Any, theirs: Any, folder: Path, num_steps: int = 2) -> None:
    """Train two equal models, one by the task, the other by transformers' own forward."""
    sides = []
    for model in (ours, theirs):
        model.requires_grad_(False)
        attach(model, LoRA(rank=2, targets="all-linear"), seed=0)
        sides.append({n: p for n, p in model.named_parameters() if p.requires_grad})
    task = task_of(name, ours)
    rows = rows_of(task, name, folder)
    parts = split_micro_batches(rows, task.num_positions, 8, None, task.bucket_key)
    num_targets = sum(row.num_targets for row in rows)
    optimizers = [torch.optim.SGD(side.values(), lr=0.01) for side in sides]
    for _ in range(num_steps):
        with task.training(ours):
            ours.train()
            losses = [task.loss(ours, task.collate(part))[0] for part in parts]
            mine = torch.stack(losses).sum() / num_targets
            mine.backward()
        theirs.train()
        wanted = torch.zeros(())
        for part in parts:
            inputs, labels = plain(name, part)
            logits = theirs(**inputs, use_cache=False).logits[:, :-1]
            wanted = wanted + F.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
        wanted = wanted / num_targets
        wanted.backward()
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
        for key, parameter in sides[0].items():
            other = sides[1][key].grad
            if other is None:
                assert parameter.grad is None or not parameter.grad.any()
                continue
            atol = max(1e-5, 1e-4 * float(other.abs().max()))  # sums of another order
            torch.testing.assert_close(parameter.grad, other, rtol=1e-3, atol=atol)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].extras])
def test_what_goes_along_with_the_tokens_is_not_left_out(name, folder):
    model = model_of(name)
    task = task_of(name, model)
    rows = rows_of(task, name, folder)
    batch = task.collate(rows[:1])
    inputs = task.inputs(model, batch)
    with torch.no_grad():
        whole = model(**inputs).logits
        for extra in FAMILIES[name].extras:
            assert extra in inputs
            try:
                less = model(**{k: v for k, v in inputs.items() if k != extra}).logits
            except (ValueError, TypeError, AttributeError):
                continue  # it says that it needs it
            assert (less - whole).abs().max() > 1e-3


@pytest.mark.parametrize("name", EACH)
def test_rows_of_a_batch_lose_what_they_lose_alone(name, folder):
    model = model_of(name)
    task = task_of(name, model)
    rows = rows_of(task, name, folder)
    with torch.no_grad():
        parts = split_micro_batches(rows, task.num_positions, 8, None, task.bucket_key)
        together = sum(float(task.loss(model, task.collate(part))[0]) for part in parts)
        alone = sum(float(task.loss(model, task.collate([row]))[0]) for row in rows)
    assert together == pytest.approx(alone, rel=1e-5)
    assert sum(map(len, parts)) == len(rows)
    if name in CHATTING:
        alone = task.encoder.media_processor.is_nested or name in ("gemma4_hearing", "qwen2_5_omni")
        assert len(parts) == (3 if alone else 2)


def test_images_cost_positions(folder):
    task = task_of("llava")
    rows = rows_of(task, "llava", folder)
    assert [row.num_patches for row in rows] == [4, 8, 0, 4]  # of 4 x 4 pixels, in 8 x 8
    assert task.num_positions([rows[0]]) == 24 + 4
    assert task.num_positions([rows[2]]) == 32
    assert "no packing" in task.paths["rows"]


def test_rows_are_shown_with_the_sizes_of_their_images(folder):
    events: list[Event] = []
    task = task_of("qwen2_vl", on_event=events.append)
    rows = rows_of(task, "qwen2_vl", folder)
    asked, answer, *more = task.spans(rows[1])
    assert asked[0] == ""
    assert "see <|vision_start|>[image 20x9: 2 tokens]<|vision_end|> the" in asked[1]
    assert answer == ("learnt", "the lazy dog over<|im_end|>")
    assert [kind for kind, _ in more] == ["", "learnt"]
    (table,) = [event for event in events if isinstance(event, Table)]
    counts = dict(table.rows)
    assert (counts["images"], counts["rows without images"]) == ("4", "1")
    assert counts["tokens of images"] == "8"


def test_rows_are_never_cut_through_an_image(tmp_path):
    events: list[Event] = []
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    rows = [
        {"messages": dialog(("user", parts), ("assistant", "the dog")), "images": ["a.png"] * 2},
        *[{"messages": dialog(("user", "what"), ("assistant", "the dog " * 20))}] * 2,
    ]
    path = str(write_sound_rows(tmp_path, rows))
    whole = task_of("llava").load(path)[0]
    second = len(whole.input_ids) - 1 - whole.input_ids[::-1].index(_image_id(task_of("llava")))
    short = task_of("llava", max_length=second, max_dropped=0.5, on_event=events.append)
    kept = short.load(path)
    assert [len(row.input_ids) for row in kept] == [second] * 2
    (table,) = [event for event in events if isinstance(event, Table)]
    assert dict(table.rows)["dropped: media or the answer beyond the cut"].startswith("1 (")
    with pytest.raises(
        DataError, match=r"Media or the answer beyond(.|\n)*rows.jsonl:1(.|\n)*max_pixels"
    ):
        task_of("llava", max_length=second, max_dropped=0.1).load(path)


def test_max_pixels_bounds_what_an_image_costs(tmp_path):
    row = {"messages": dialog(("user", "<image>"), ("assistant", "dog")), "image": "big.png"}
    path = write_sound_rows(tmp_path, [row])
    (tmp_path / "big.png").write_bytes(vision.png(size=(32, 16)))
    (large,) = task_of("qwen2_vl").load(str(path))
    task = task_of("qwen2_vl", max_pixels=130)
    (small,) = task.load(str(path))
    assert (large.sizes, large.media_tokens) == (("32x16",), (8,))
    assert (small.sizes, small.media_tokens) == (("16x8",), (2,))
    assert task.collate([small])["image_grid_thw"].tolist() == [[1, 2, 4]]


def test_rows_read_the_same_wherever_their_images_lie(tmp_path):
    marks = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        task = task_of("llava")
        marks.append(fingerprint(rows_of(task, "llava", tmp_path / place)))
    assert marks[0] == marks[1]
    (tmp_path / "two" / "a.png").write_bytes(vision.png("white"))
    rows = task_of("llava").load(str(tmp_path / "two" / "rows.jsonl"))
    assert fingerprint(rows) != marks[0]


def test_a_template_of_plain_texts_gets_the_processors_own_mark(folder):
    task = task_of("llava", chat_template="chatml")
    rows = rows_of(task, "llava", folder)
    assert rows[1].text.startswith("<|im_start|>user\nsee <image> the <image> dog<|im_end|>")
    assert [row.media_tokens for row in rows] == [(4,), (4, 4), (), (4,)]


def test_an_answer_melted_into_its_prompt_is_carried_on(tmp_path, folder):
    """Where tokens of the answer are made apart, what goes along with them goes on."""
    template = tmp_path / "melting.jinja"
    template.write_text(
        "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{%- for p in m.content -%}{{ '<|image|>' if p.type == 'image' else p.text }}{%- endfor -%}"
        "{{ ' the a' }}{%- else -%}{{ m.content[0].text }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{%- endif -%}"
    )
    row = {
        "messages": dialog(("user", "<image> what"), ("assistant", "nswer is it")),
        "image": "a.png",
    }
    model = model_of("mllama")
    task = task_of("mllama", model, chat_template=str(template))
    (found,) = task.load(str(write_sound_rows(tmp_path, [row])))
    learnt = [label for label in found.labels if label != -100]
    assert task.tokenizer.decode(learnt) == "nswer is it<|im_end|>"
    mask = task.collate([found])["cross_attention_mask"][0, :, 0, 0]
    start = found.input_ids.index(_image_id(task))
    length = len(found.input_ids)
    assert mask[start:length].all()
    assert not mask[length:].any()


# ------------------------------------------------------------------- what cannot be


def test_a_base_that_sees_nothing_is_refused(llama):
    with pytest.raises(BaseError, match="no token for images"):
        ImageTextConfig().on(llama, processor_of("llava"), DataConfig(train=""))


def test_a_model_that_sees_the_answer_is_refused(folder):
    model = model_of("paligemma")  # which sees all of a text that it is not told is an answer
    task = task_of("paligemma", model)
    row = rows_of(task, "paligemma", folder)[0]
    inputs = task.inputs(model, task.collate([row]))
    place = len(row.input_ids) - 1
    check_causal_answer(model, inputs, place, 7)
    inputs["token_type_ids"] = torch.zeros_like(inputs["token_type_ids"])
    with pytest.raises(BaseError, match="change with the response's tokens after it"):
        check_causal_answer(model, inputs, place, 7)


def test_a_processor_without_a_chat_template_is_named(folder):
    processor = vision.LLAVA.processor()
    processor.chat_template = None
    task = ImageTextConfig().on(model_of("llava"), processor, DataConfig(train="", max_length=None))
    with pytest.raises(DataError, match=r"LlavaProcessor has no chat template(.|\n)*chat_template"):
        rows_of(task, "llava", folder)


def test_a_template_that_writes_no_images_is_named(tmp_path):
    (tmp_path / "a.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(DataError, match="does not render images"):
        task_of("llava", chat_template=str(tmp_path / "a.jinja"))


TWO_TURNS = dialog(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
MARKED = dialog(("user", "a <|image_pad|> b"), ("assistant", "dog"))
ABOUT_SOUND = dialog(("user", "what?"), ("assistant", "dog"))


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("qwen2_vl", {"messages": MARKED, "image": "a.png"}, r"1 media(.|\n)*2 of the"),
        ("paligemma", {"messages": TWO_TURNS, "image": "a.png"}, "one prompt and one answer"),
        ("paligemma", {"prompt": "a", "completion": "b"}, "annot use"),
        (
            "llava",
            {"messages": ABOUT_SOUND, "audio": "a.wav"},
            "audio clip 1 of (.|\n)*does not support audio clips",
        ),
        ("glmasr", {"messages": ABOUT_SOUND, "audio": ["a.wav"] * 2}, "1 text but 2 audios"),
    ],
)
def test_rows_that_a_processor_cannot_take_are_named(name, row, words, tmp_path):
    with pytest.raises(DataError, match=words) as refused:
        task_of(name).load(str(write_sound_rows(tmp_path, [row])))
    assert "rows.jsonl:1" in str(refused.value)


@pytest.fixture(autouse=True)
def _no_gradients_left() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


def test_what_cannot_chat_about_images_is_refused_by_name():
    model, processor = model_of("llava"), copy.copy(processor_of("llava"))

    class Blip(type(model)):  # type: ignore[misc]
        def forward(self, pixel_values: Tensor, **more: Any) -> Any:
            return super().forward(pixel_values=pixel_values, **more)

    class FuyuProcessor(type(processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **more: Any) -> Any:
            raise TypeError("patches of another kind")

    processor.__class__ = FuyuProcessor
    with pytest.raises(BaseError, match=r"(?s)Cannot use FuyuProcessor.*patches of another kind"):
        ImageTextConfig().on(model, processor, DataConfig(train="", max_length=None))
    model.__class__ = Blip
    with pytest.raises(BaseError, match=r"(?s)Cannot train Blip.*read text without images"):
        ImageTextConfig().on(model, processor_of("llava"), DataConfig(train="", max_length=None))


# ------------------------------------------------------------------- sounds


def test_rows_with_any_number_of_sounds_share_a_batch(folder):
    task = task_of("qwen2_audio")
    rows = rows_of(task, "qwen2_audio", folder)
    assert [len(row.media) for row in rows] == [1, 2, 0, 1]
    assert [row.media_tokens for row in rows] == [(5,), (9, 5), (), (9,)]
    batch = task.collate([rows[0], rows[1], rows[3]])
    assert batch["input_features"].shape == (4, 16, 100)
    assert batch["feature_attention_mask"].sum(-1).tolist() == [20, 35, 20, 35]
    assert [row.num_patches for row in rows] == [50, 100, 0, 50]
    assert task.num_positions([rows[0]]) == 32 + 50
    pieces = [text for _, text in task.spans(rows[1])]
    assert "see <|audio_bos|>[audio clip 0.35 s: 9 tokens]<|audio_eos|>" in pieces[0]


def test_images_and_sounds_of_one_row_are_both_given(folder):
    task = task_of("gemma4_hearing")
    row = rows_of(task, "gemma4_hearing", folder)[3]
    assert [one.kind for one in row.media] == ["image", "audio clip"]
    batch = task.collate([row])
    assert {"pixel_values", "input_features"} <= batch.keys()
    assert set(batch["mm_token_type_ids"].unique().tolist()) == {0, 1, 3}


def spoken(folder: Path, sound: bytes | None) -> str:
    """Return a file of one row about a sound."""
    if sound is not None:
        (folder / "it.wav").write_bytes(sound)
    return str(write_sound_rows(folder, [{"messages": ABOUT_SOUND, "audio": "it.wav"}]))


def test_silence_is_heard(tmp_path):
    (row,) = task_of("qwen2_audio").load(spoken(tmp_path, encoded(0 * tones(300))))
    assert row.sizes == ("0.10 s",)


@pytest.mark.parametrize(
    ("sound", "words"),
    [
        (b"no sound at all", "audio clip 1 of .*rows.jsonl:1(.|\n)*wav, flac"),
        (encoded(tones(300, seconds=1.5)), r"rows.jsonl:1(.|\n)*1.5 s, more than 1 s"),
        (None, r"rows.jsonl:1(.|\n)*it.wav"),
        (encoded(tones(300)[:0]), "empty"),
        (encoded(tones(300)[:100]), "audio clip 1 of .*rows.jsonl:1(.|\\n)*0.006 s, less than 0.1"),
    ],
)
def test_bad_sounds_are_named(sound, words, tmp_path):
    with pytest.raises(DataError, match=words):
        task_of("qwen2_audio").load(spoken(tmp_path, sound))


def test_a_base_that_hears_nothing_is_refused():
    with pytest.raises(BaseError, match="no token for audio clips"):
        AudioTextConfig().on(model_of("llava"), processor_of("llava"), ANY_LENGTH)


def test_sounds_that_the_processor_would_cut_are_refused():
    task = AudioTextConfig(max_seconds=1.5)
    with pytest.raises(DataError, match=r"1.5 s are too long(.|\n)*max_seconds"):
        task.on(model_of("qwen2_audio"), processor_of("qwen2_audio"), ANY_LENGTH)


def test_the_towers_of_hearing_models_stay_in_16_bits_and_are_not_adapted():
    for name in HEARING:
        model = model_of(name)
        assert any("audio_tower" in path for path in tower_paths(model))
        found = attach(model, LoRA(rank=2)).modules
        assert found
        assert not any("audio_tower" in path or "projector" in path for path in found)
