"""Images with labels, from folders and from rows: what is read, refused, learnt and measured."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import ViTImageProcessorPil

from peftkit.base.load import load_base
from peftkit.data.rows.lazy import fingerprint
from peftkit.errors import DataError
from peftkit.evaluation.evaluate import evaluate
from peftkit.events import Event, StepDone, Table
from peftkit.formats.open_adapter import open_adapter
from peftkit.settings import DataConfig
from peftkit.tasks.media.media_classification import ImageClassification, ImageClassificationConfig
from tests.helpers.families import ARCHITECTURES
from tests.helpers.finished import finished, sections
from tests.helpers.folders import write_rows
from tests.helpers.vision import COLOURS, solid_png

SIZES = {"vit": 8, "swin": 16}


def model_of(name: str = "vit", labels: Sequence[str] = tuple(COLOURS)) -> Any:
    model = ARCHITECTURES[name]().eval()
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: number for number, label in enumerate(labels)}
    return model


def task_on(model: Any, *, on_event: Any = None, **settings: Any) -> ImageClassification:
    size = model.config.image_size
    processor = ViTImageProcessorPil(size={"height": size, "width": size})
    config = ImageClassificationConfig(**settings)
    events = {} if on_event is None else {"on_event": on_event}
    return config.on(model, processor, DataConfig(train=""), **events)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three folders of two images each, of unequal sizes."""
    for name, colour in COLOURS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(2):
            data = solid_png(colour, (9 + number, 41))
            (tmp_path / "data" / name / f"{number}.png").write_bytes(data)
    return tmp_path / "data"


def test_class_folders_are_labels(folder):
    (folder / "red" / ".DS_Store").write_bytes(b"x")
    events: list[Event] = []
    config = ImageClassificationConfig()
    data = DataConfig(train=str(folder))
    head = config.resolve(data).purpose.head
    assert head is not None
    assert head.labels == ("blue", "green", "red")
    task = task_on(model_of(), on_event=events.append)
    rows = task.load(str(folder))
    assert [row.label for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [row.source for row in rows] == [
        str(folder / name / f"{number}.png") for name in COLOURS for number in range(2)
    ]
    (table,) = [event for event in events if isinstance(event, Table)]
    assert dict(table.rows) == {
        "rows read": "6",
        "rows kept": "6",
        "blue": "2",
        "green": "2",
        "red": "2",
    }
    assert task.spans(rows[1]) == [("image", "10 x 41 pixels"), ("learnt", "blue")]


def test_rows_name_files_beside_them(folder):
    path = folder.parent / "rows.jsonl"
    lines = [{"file": "data/red/0.png", "kind": "red"}, {"file": "data/blue/1.png", "kind": "blue"}]
    write_rows(path, lines)
    task = task_on(model_of(), image="file", label="kind")
    rows = task.load(str(path))
    assert [(row.label, row.source) for row in rows] == [(2, f"{path}:1"), (0, f"{path}:2")]
    with pytest.raises(DataError, match=r"image: missing \(task.image\)"):
        task_on(model_of(), label="kind").load(str(path))


def test_data_sets_hold_bytes_and_name_their_classes(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path, [solid_png("green"), solid_png("blue")], [1, 0])
    rows = task_on(model_of()).load(str(path))
    assert [row.label for row in rows] == [1, 0]
    config = ImageClassificationConfig().resolve(DataConfig(train=str(path)))
    assert config.labels == ("blue", "green")


def parquet(path: Path, images: list[bytes], labels: list[int]) -> None:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLOURS))}
    )
    stored = [{"bytes": data, "path": None} for data in images]
    rows = datasets.Dataset.from_dict({"image": stored, "label": labels}, features=features)
    rows.to_parquet(str(path))


def test_an_image_that_does_not_decode_is_named(tmp_path, folder):
    path = tmp_path / "a.parquet"
    parquet(path, [solid_png("red"), b"nothing"], [2, 2])
    with pytest.raises(DataError, match=r"a.parquet:2\.\n  It is in no image format") as caught:
        task_on(model_of()).load(str(path))
    assert caught.value.exit_code == 2
    whole = (folder / "green" / "1.png").read_bytes()
    (folder / "green" / "1.png").write_bytes(whole[: len(whole) // 2])  # a download that broke off
    with pytest.raises(DataError, match=r"green/1.png"):
        task_on(model_of()).load(str(folder))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"image": "gone.png", "label": "red"}')
    with pytest.raises(DataError, match=r"rows.jsonl:1(.|\n)*gone.png"):
        task_on(model_of()).load(str(rows))
    rows.write_text('{"image": 3, "label": "red"}')
    with pytest.raises(DataError, match=r"image: expected a path .* found 3"):
        task_on(model_of()).load(str(rows))


def test_deep_pixels_are_not_cut_off(folder):
    (folder / "red" / "2.png").write_bytes(solid_png(40000, mode="I;16"))
    with pytest.raises(DataError, match=r"red/2.png(.|\n)*more than 8 bits"):
        task_on(model_of()).load(str(folder))


def test_photos_are_turned_upright(tmp_path):
    (tmp_path / "red").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (20, 10)).save(tmp_path / "red" / "0.jpg", exif=exif)
    task = task_on(model_of())
    (row,) = task.load(str(tmp_path))
    assert task.spans(row)[0] == ("image", "10 x 20 pixels")


def test_a_label_that_the_head_lacks_is_named(folder):
    with pytest.raises(DataError, match=r"green/0.png(.|\n)*head does not know(.|\n)*'green'"):
        task_on(model_of(labels=("blue", "yellow", "red"))).load(str(folder))


def test_a_folder_of_empty_folders_is_an_error(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="folders contain no files"):
        task_on(model_of()).load(str(tmp_path))


def test_without_pillow_the_error_says_how_to_get_it(folder, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "PIL" else find(n))
    with pytest.raises(DataError, match=r"pip install -e .\.\[images\]"):
        ImageClassificationConfig().resolve(DataConfig(train=str(folder)))
    with pytest.raises(DataError, match=r"pip install -e .\.\[images\]"):
        task_on(model_of()).load(str(folder))


def test_rows_are_the_same_wherever_they_lie(folder):
    before = fingerprint(task_on(model_of()).load(str(folder)))
    moved = folder.rename(folder.parent / "moved")
    assert fingerprint(task_on(model_of()).load(str(moved))) == before
    (moved / "red" / "0.png").write_bytes(solid_png("white"))
    assert fingerprint(task_on(model_of()).load(str(moved))) != before


@pytest.mark.parametrize("name", SIZES)
def test_loss_is_the_model_s(name, folder):
    model = model_of(name)
    task = task_on(model)
    rows = task.load(str(folder))
    batch = task.collate(rows)
    assert batch["pixel_values"].shape == (6, 3, SIZES[name], SIZES[name])
    with torch.no_grad():
        out = model(pixel_values=batch["pixel_values"], labels=batch["targets"])
        torch.testing.assert_close(task.loss(model, batch)[0], out.loss * 6)
    before = task.metrics(model, rows)
    right = (out.logits.argmax(-1) == batch["targets"]).float().mean()
    assert before["accuracy"] == pytest.approx(float(right))
    assert before["loss"] == pytest.approx(float(out.loss), rel=1e-5)


def test_a_base_brings_its_processor_or_gets_one_of_its_size(tmp_path):
    model_of("swin").save_pretrained(tmp_path)
    purpose = ImageClassificationConfig(labels=tuple(COLOURS)).purpose
    plain = load_base(str(tmp_path), purpose=purpose).processor
    white = plain([Image.new("RGB", (5, 7), "white")], return_tensors="pt")["pixel_values"]
    assert torch.equal(white, torch.ones(1, 3, 16, 16))
    own = ViTImageProcessorPil(size={"height": 8, "width": 4}, image_mean=[0.0] * 3)
    own.save_pretrained(tmp_path)
    own = load_base(str(tmp_path), purpose=purpose).processor
    grey = own([Image.new("RGB", (5, 7), "white")], return_tensors="pt")["pixel_values"]
    assert torch.equal(grey, torch.full((1, 3, 8, 4), 2.0))


@pytest.mark.covers("peftkit")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_trains_a_new_head_saves_it_and_is_measured(name, folder, tmp_path):
    base = ARCHITECTURES[name]()  # of three labels without names
    base.save_pretrained(tmp_path / "base")
    told = sections(
        tmp_path, tmp_path / "base", str(folder), "image_classification", fresh_head=True
    )
    told["method"]["targets"], told["data"] = "attention", {"train": str(folder)}
    train = {"max_steps": 30, "batch_size": 6, "learning_rate": 0.01}
    done = finished(told, data={"eval": str(folder)}, train=train)
    losses = [step.loss for step in done.of_kind(StepDone)]
    assert losses[-1] < losses[0] / 2
    opened = open_adapter(done.folder)
    found = evaluate(opened.base, folder, task=opened.task)
    assert found["loss"] == pytest.approx(done.metrics["eval_loss"], rel=1e-4)
    assert found["accuracy"] == found["f1_macro"] == 1.0
    task = task_on(opened.base.model)
    batch = task.collate(task.load(str(folder)))
    theirs = peft.PeftModel.from_pretrained(base.eval(), done.folder)
    with torch.no_grad():
        wanted = theirs(pixel_values=batch["pixel_values"]).logits
        ours = opened.base.model(pixel_values=batch["pixel_values"]).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_one_channel_is_read_as_grey(folder):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        num_channels=1,
        id2label=dict(enumerate(COLOURS)),
    )
    model = ViTForImageClassification(config).eval()
    processor = ViTImageProcessorPil(
        size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5]
    )
    task = ImageClassificationConfig().on(model, processor, DataConfig(train=""))
    batch = task.collate(task.load(str(folder)))
    assert batch["pixel_values"].shape == (6, 1, 8, 8)
    with torch.no_grad():
        logits = model(batch["pixel_values"]).logits
        wanted = F.cross_entropy(logits, batch["targets"], reduction="sum")
        torch.testing.assert_close(task.loss(model, batch)[0], wanted)
