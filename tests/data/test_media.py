"""Images and videos of rows: where they are, how they are decoded, what is refused."""

import base64
import io
import json
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

from peftkit.data.examples import Conversation
from peftkit.data.media import files as media
from peftkit.data.media.files import Picture, Video
from peftkit.data.media.text import parse_with_media
from peftkit.data.records import Record, read_records
from peftkit.errors import DataError
from peftkit.settings import DataConfig
from peftkit.tasks.media.media_text import ImageTextConfig
from tests.helpers import vision
from tests.helpers.vision import FAMILIES, dialog, png, template, tokenizer, write_image_rows

SEEN = ("assistant", "a fox")


def parsed(tmp_path: Path, row: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Return the contents of a row's messages, and what its pictures are."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    ((example, pictures),), *_ = parse_with_media(read_records(str(path)), "auto", where=str(path))
    if isinstance(example, Conversation):
        return [message["content"] for message in example.messages], [p.data for p in pictures]
    texts = [getattr(example, n, "") for n in ("request", "prompt", "output", "completion")]
    return [text for text in texts if text], [p.data for p in pictures]


def refused(tmp_path: Path, row: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        parsed(tmp_path, row)
    assert "rows.jsonl:1" in str(caught.value)
    return str(caught.value)


URL = "data:image/png;base64," + base64.b64encode(png()).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "input_image", "image_url": "a.png", "text": None},
        {"type": "image"},
    ],
)
def test_images_stand_where_their_parts_do(part, tmp_path):
    content = [{"type": "text", "text": "see "}, part, {"type": "text", "text": " this"}]
    row: dict[str, Any] = {"messages": dialog(("user", content), SEEN)}
    if part == {"type": "image"}:
        row["images"] = ["a.png"]
    assert parsed(tmp_path, row) == ([f"see {Picture.mark} this", "a fox"], [tmp_path / "a.png"])


def test_images_of_several_turns_keep_their_order(tmp_path):
    turns = dialog(
        ("user", "<image> and <image>"),
        SEEN,
        ("user", [{"type": "text", "text": "<image>"}, {"type": "image", "image": URL}]),
        SEEN,
    )
    texts, images = parsed(tmp_path, {"messages": turns, "images": ["1.png", "2.png", "3.png"]})
    assert texts == [f"{Picture.mark} and {Picture.mark}", "a fox", Picture.mark * 2, "a fox"]
    assert images == [*(tmp_path / f"{n}.png" for n in (1, 2, 3)), URL]


def test_llavas_own_rows_are_read(tmp_path):
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a fox"}]
    row = {"id": "7", "image": "coco/7.jpg", "conversations": turns}
    assert parsed(tmp_path, row) == (
        [f"{Picture.mark}\nwhat?", "a fox"],
        [tmp_path / "coco" / "7.jpg"],
    )


@pytest.mark.parametrize(
    "row",
    [
        {"messages": dialog(("system", "be short"), ("user", "what?"), SEEN)},
        {"question": "what?", "answer": "a fox"},
        {"instruction": "what?", "output": "a fox"},
        {"prompt": "what?", "completion": "a fox"},
        {"prompt": dialog(("user", "what?")), "completion": dialog(SEEN)},
    ],
)
def test_images_without_marks_begin_the_question(row, tmp_path):
    texts, images = parsed(tmp_path, {**row, "images": ["a.png", {"path": "/b.png"}]})
    assert texts[-2:] == [f"{Picture.mark * 2}what?", "a fox"]
    assert images == [tmp_path / "a.png", Path("/b.png")]


def test_bytes_of_a_data_set_are_images():
    record = Record(
        {"image": {"bytes": png(), "path": None}, "question": "a", "answer": "b"}, "x:1"
    )
    ((_, (image,)),), *_ = parse_with_media([record], "auto", where="x")
    assert image.decode().size == (9, 12)
    coded = {"type": "image", "base64": base64.b64encode(png()).decode()}
    record = Record({"messages": dialog(("user", [coded]), SEEN)}, "x:1")
    ((_, (image,)),), *_ = parse_with_media([record], "auto", where="x")
    assert image.decode().size == (9, 12)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": dialog(("user", "<image> <image>"), SEEN), "images": ["a"]},
            "image 2.*has 1",
        ),
        (
            {"messages": dialog(("user", "<image>"), SEEN), "images": ["a"] * 3},
            "3 images, and 1 mark",
        ),
        ({"messages": dialog(("user", "<image>"), SEEN)}, "the row has 0"),
        ({"messages": dialog(("system", "<image>"), ("user", "a"), SEEN), "image": "a"}, "system"),
        ({"messages": dialog(("user", "a"), ("assistant", "<image>")), "image": "a"}, "assistant"),
        ({"prompt": "a", "completion": "<image>", "image": "a"}, "in the answer"),
        ({"text": "a", "image": "a"}, "no question or prompt"),
        ({"text": "a"}, "a text alone"),
        ({"messages": dialog(("user", [{"type": "smell"}]), SEEN)}, "found 'smell'"),
        ({"messages": dialog(("user", "a"), SEEN), "image": 3}, "images?.0.*a value"),
        ({"messages": dialog(("user", "a"), SEEN), "image": "a", "images": ["b"]}, "leave one"),
        ({"messages": dialog(("user", f"a {Picture.mark}"), SEEN)}, "reserved as the mark"),
        (
            {
                "messages": dialog(
                    ("user", [{"type": "image", "image": "https://x.org/a.png"}]), SEEN
                )
            },
            "Cannot use image 1 of .*(.|\n)*nothing is fetched",
        ),
    ],
)
def test_rows_that_cannot_be_are_named(row, words, tmp_path):
    assert re.search(words, refused(tmp_path, row))


def file(image: Image.Image, kind: str, **more: Any) -> bytes:
    stored = io.BytesIO()
    image.save(stored, kind, **more)
    return stored.getvalue()


def bomb() -> bytes:
    """Return a PNG of a few bytes that says it has 50,000 x 50,000 pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


GREY = Image.new("L", (4, 4))
HOSTILE = {
    "truncated": (png(size=(64, 64))[:90], "(truncated|broken)"),
    "bomb": (bomb(), "100,000,000 pixels"),
    "animated": (
        file(GREY, "GIF", save_all=True, append_images=[Image.new("L", (4, 4), 9)]),
        "several frames",
    ),
    "print": (file(Image.new("CMYK", (4, 4)), "JPEG"), "CMYK(.|\n)*RGB"),
    "deep": (file(Image.new("I;16", (4, 4)), "PNG"), "more than 8 bits"),
    "svg": (b'<?xml version="1.0"?><svg width="4"/>', "SVG(.|\n)*PNG"),
    "empty": (b"", "no image format"),
    "text": (b"no image at all", "no image format"),
    "no pixels": (b"BM" + file(GREY, "BMP")[2:18] + bytes(8) + file(GREY, "BMP")[26:], ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_named_with_their_row(name, tmp_path):
    data, words = HOSTILE[name]
    (tmp_path / "x").write_bytes(data)
    for stored in (
        data,
        tmp_path / "x",
        "data:image/png;base64," + base64.b64encode(data).decode(),
    ):
        with pytest.raises(DataError, match=r"Cannot decode image 2 of a.jsonl:7\.") as caught:
            Picture(stored, "a.jsonl:7", "image 2").decode()
        assert re.search(words, str(caught.value))
        assert caught.value.fix


def test_a_path_of_an_unknown_user_is_named_with_its_row():
    record = Record({}, "a.jsonl:7")
    with pytest.raises(DataError, match=r"image 1 of a.jsonl:7(.|\n)*~nosuchuser/x.png"):
        media.media_of(Picture, "~nosuchuser/x.png", record, "a.jsonl", "image 1")


def test_absent_and_long_images_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"image of a:1(.|\n)*gone.png"):
        Picture(tmp_path / "gone.png", "a:1").decode()
    with pytest.raises(DataError, match="It is not a regular file"):
        Picture(Path("/dev/zero"), "a:1").decode()
    with pytest.raises(DataError, match="data URL"):
        Picture("data:;base64,!!!", "a:1").decode()
    monkeypatch.setattr(media, "MAX_BYTES", 50)
    (tmp_path / "a.png").write_bytes(png())
    for stored in (png(), tmp_path / "a.png", URL):
        with pytest.raises(DataError, match=r"bytes, more than 50(.|\n)*smaller"):
            Picture(stored, "a:1").decode()


def test_bytes_that_changed_after_preparation_are_refused():
    picture = Picture(png(), "a:1")
    digest = picture.stored()["digest"] or (picture.encoded() and picture.stored()["digest"])
    whole = png()
    damaged = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    assert Picture(whole, "a:1", digest=digest).encoded() == whole
    with pytest.raises(DataError, match="bytes changed"):
        Picture(damaged, "a:1", digest=digest).encoded()


def test_large_images_are_scaled_in_proportion():
    small = Picture(png(size=(40, 10)), "a:1").decode(max_pixels=100)
    assert small.size == (20, 5)
    assert Picture(png(size=(40, 10)), "a:1").decode(max_pixels=400).size == (40, 10)


def film(
    number: int = 50,
    size: tuple[int, int] = (64, 48),
    *,
    kind: str = "mp4",
    codec: str = "libx264",
    rate: int = 10,
) -> bytes:
    """Return a video whose frames become brighter, by five at a time."""
    av = pytest.importorskip("av", reason="the extra peftkit[video] is not installed")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.gop_size = 12
        for bright in range(number):
            pixels = torch.full((size[1], size[0], 3), 5 * bright % 256, dtype=torch.uint8)
            frame = av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.fixture(scope="module")
def clip() -> bytes:
    return film()


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("gif", "gif")],
)
def test_frames_lie_evenly_from_the_first_to_the_last(kind, codec):
    clip = Video(film(kind=kind, codec=codec), "a:1").decode(8)
    assert clip.frames.shape == (8, 3, 48, 64)
    assert clip.places == (0, 7, 14, 21, 28, 35, 42, 49)
    assert (clip.num_frames, clip.fps) == (50, pytest.approx(10, rel=0.05))
    means = clip.frames.float().mean((1, 2, 3)).tolist()
    assert means == pytest.approx([35 * n for n in range(8)], abs=6)


def test_short_videos_are_shown_whole_and_large_ones_scaled_down(clip):
    assert Video(film(3), "a:1").decode(8).places == (0, 1, 2)
    assert Video(film(1), "a:1").decode(8).places == (0,)
    assert Video(clip, "a:1").decode(1).places == (0,)
    assert Video(clip, "a:1").decode(2, max_pixels=800).frames.shape == (2, 3, 24, 32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda whole: b"no video at all", "does not decode"),
        (lambda whole: b"", "does not decode"),
        (lambda whole: whole[: len(whole) // 2], "does not decode"),
        (lambda whole: b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1:9/a.ts\n", "does not decode"),
        (lambda whole: b"ffconcat version 1.0\nfile /etc/passwd\n", "does not decode"),
    ],
)
def test_hostile_videos_are_named_with_their_row(change, words, clip):
    with pytest.raises(DataError, match=rf"video 1 of a.jsonl:7(.|\n)*{words}"):
        Video(change(clip), "a.jsonl:7", "video 1").decode(4)


@pytest.mark.parametrize(
    ("bound", "most", "words"),
    [
        ("MAX_VIDEO_FRAMES", 49, "more than 49 frames"),
        ("MAX_VIDEO_SECONDS", 4, "lasts 5 s, more than 4"),
        ("MAX_FRAME_PIXELS", 64 * 48 - 1, "more than 3,071 pixels"),
        ("MAX_VIDEO_PIXELS", 64 * 48 * 50 - 1, "more than 49 frames of 3,072 pixels"),
    ],
)
def test_videos_have_a_bounded_length(bound, most, words, clip, monkeypatch):
    monkeypatch.setattr(media, bound, most)
    with pytest.raises(DataError, match=words):
        Video(clip, "a:1").decode(4)


# ------------------------------------------------------------------- what a model is shown


def watching(stem: str, kind: str) -> Any:
    """Return a processor of images and videos."""
    pytest.importorskip("torchvision", reason="transformers reads videos with it")
    size: dict[str, Any] = {"shortest_edge": 64, "longest_edge": 1024}
    pad = "<|vision_start|><|{}_pad|><|vision_end|>"
    return getattr(transformers, f"{stem}Processor")(
        image_processor=transformers.Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, size=size
        ),
        tokenizer=tokenizer(*vision.QWEN),
        video_processor=getattr(transformers, f"{kind}VideoProcessor")(
            patch_size=4, merge_size=2, temporal_patch_size=2, size=size, cap_pixels_per_frame=True
        ),
        chat_template=template(pad.format("image"), video=pad.format("video")),
    )


ROWS = [
    {
        "messages": dialog(
            ("user", [{"type": "video", "video": "v.mp4"}, {"type": "text", "text": "what?"}]),
            ("assistant", "the fox"),
        )
    },
    {
        "messages": dialog(("user", "see <video> dog <image>"), ("assistant", "the lazy dog")),
        "videos": ["w.mp4"],
        "image": "a.png",
    },
]


def rows_of(task: Any, folder: Path, rows: Sequence[Any] = ROWS) -> Any:
    (folder / "v.mp4").write_bytes(film())
    (folder / "w.mp4").write_bytes(film(7, (32, 32)))
    return task.load(str(write_image_rows(folder, rows)))


@pytest.mark.parametrize(
    ("name", "stem", "kind"),
    [
        ("qwen2_vl", "Qwen2VL", "Qwen2VL"),
        ("qwen2_5_vl", "Qwen2_5_VL", "Qwen2VL"),
        ("qwen3_vl", "Qwen3VL", "Qwen3VL"),
    ],
)
def test_the_loss_matches_processor_inputs(name, stem, kind, tmp_path):
    model, _ = FAMILIES[name].build()
    processor = watching(stem, kind)
    data = DataConfig(train="", max_length=None, video_frames=4)
    task = ImageTextConfig().on(model, processor, data)
    for row in rows_of(task, tmp_path):
        clips = [one.decode(4) for one in row.media if one.kind == "video"]
        images = [one.decode() for one in row.media if one.kind == "image"]
        inputs = processor(
            text=[row.text],
            images=[images] if images else None,
            videos=[clip.frames for clip in clips],
            video_metadata=[
                {"total_num_frames": c.num_frames, "fps": c.fps, "frames_indices": [*c.places]}
                for c in clips
            ],
            do_sample_frames=False,
            return_tensors="pt",
        )
        assert inputs["input_ids"][0].tolist()[: len(row.input_ids)] == list(row.input_ids)
        assert not set(row.labels) & {model.config.video_token_id, model.config.image_token_id}
        targets = [label for label in row.labels if label != -100]
        assert task.tokenizer.decode(targets).removesuffix("<|im_end|>") in (
            "the fox",
            "the lazy dog",
        )
        labels = torch.full(inputs["input_ids"].shape, -100)
        labels[0, : len(row.labels)] = torch.tensor(row.labels)
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0, :-1]
            theirs = F.cross_entropy(logits, labels[0, 1:], reduction="sum")
            torch.testing.assert_close(task.loss(model, task.collate([row]))[0], theirs)


def test_rows_say_how_much_of_a_video_is_shown(tmp_path):
    model, _ = FAMILIES["qwen2_vl"].build()
    config = ImageTextConfig(video_frames=6)
    task = config.on(model, watching("Qwen2VL", "Qwen2VL"), DataConfig(train="", max_length=None))
    first, second = rows_of(task, tmp_path)
    assert first.sizes == ("6 of 50 frames, 64x48",)
    assert second.sizes == ("6 of 7 frames, 32x32", "9x12")
    assert "[video 6 of 50 frames, 64x48: 36 tokens]" in task.spans(first)[0][1]
    assert task.collate([first])["video_grid_thw"].tolist() == [[3, 6, 8]]
    assert task.bucket_key(first) != task.bucket_key(second)


def test_a_model_that_watches_nothing_refuses_a_video_by_name(tmp_path):
    model, processor = FAMILIES["llava"].build()
    task = ImageTextConfig().on(model, processor, DataConfig(train="", max_length=None))
    with pytest.raises(DataError, match=r"video 1 of .*rows.jsonl:1(.|\n)*does not support videos"):
        rows_of(task, tmp_path)
