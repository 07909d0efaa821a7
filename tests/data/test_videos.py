"""Videos: which frames are shown, what is refused, and what a model that watches learns of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from peftkit.data import media
from peftkit.data.load import DataConfig
from peftkit.data.media import Video
from peftkit.errors import DataError
from peftkit.tasks.media_text import ImageTextConfig
from tests import vision
from tests.vision import FAMILIES, said, template, tokenizer, write_rows

av = pytest.importorskip("av", reason="the extra peftkit[video] is not installed")


def film(
    number: int = 50,
    size: tuple[int, int] = (64, 48),
    *,
    kind: str = "mp4",
    codec: str = "libx264",
    rate: int = 10,
) -> bytes:
    """Return a video whose frames become brighter, by five at a time."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as made:
        stream = made.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.gop_size = 12
        for bright in range(number):
            pixels = torch.full((size[1], size[0], 3), 5 * bright % 256, dtype=torch.uint8)
            frame = av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return file.getvalue()


@pytest.fixture(scope="module")
def clip() -> bytes:
    return film()


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("gif", "gif")],
)
def test_frames_lie_evenly_from_the_first_to_the_last(kind: str, codec: str) -> None:
    found = Video(film(kind=kind, codec=codec), "a:1").decode(8)
    assert found.frames.shape == (8, 3, 48, 64)
    assert found.places == (0, 7, 14, 21, 28, 35, 42, 49)
    assert (found.num_frames, found.fps) == (50, pytest.approx(10, rel=0.05))
    means = found.frames.float().mean((1, 2, 3)).tolist()
    assert means == pytest.approx([35 * n for n in range(8)], abs=6)


def test_short_videos_are_shown_whole_and_large_ones_scaled_down(clip: bytes) -> None:
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
def test_hostile_videos_are_named_with_their_row(change: Any, words: str, clip: bytes) -> None:
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
def test_videos_are_bounded(
    bound: str, most: int, words: str, clip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "messages": said(
            ("user", [{"type": "video", "video": "v.mp4"}, {"type": "text", "text": "what?"}]),
            ("assistant", "the fox"),
        )
    },
    {
        "messages": said(("user", "see <video> dog <image>"), ("assistant", "the lazy dog")),
        "videos": ["w.mp4"],
        "image": "a.png",
    },
]


def rows_of(task: Any, folder: Path, rows: Sequence[Any] = ROWS) -> Any:
    (folder / "v.mp4").write_bytes(film())
    (folder / "w.mp4").write_bytes(film(7, (32, 32)))
    return task.load(str(write_rows(folder, rows)))


@pytest.mark.parametrize(
    ("name", "stem", "kind"),
    [
        ("qwen2_vl", "Qwen2VL", "Qwen2VL"),
        ("qwen2_5_vl", "Qwen2_5_VL", "Qwen2VL"),
        ("qwen3_vl", "Qwen3VL", "Qwen3VL"),
    ],
)
def test_the_loss_is_that_of_the_processors_own_inputs(
    name: str, stem: str, kind: str, tmp_path: Path
) -> None:
    model, _ = FAMILIES[name].build()
    processor = watching(stem, kind)
    data = DataConfig(train="", max_length=None, video_frames=4)
    task = ImageTextConfig().on(model, processor, data)
    for row in rows_of(task, tmp_path):
        clips = [one.decode(4) for one in row.media if one.kind == "video"]
        images = [one.decode() for one in row.media if one.kind == "image"]
        made = processor(
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
        assert made["input_ids"][0].tolist()[: len(row.input_ids)] == list(row.input_ids)
        assert not set(row.labels) & {model.config.video_token_id, model.config.image_token_id}
        learnt = [label for label in row.labels if label != -100]
        assert task.tokenizer.decode(learnt).removesuffix("<|im_end|>") in (
            "the fox",
            "the lazy dog",
        )
        labels = torch.full(made["input_ids"].shape, -100)
        labels[0, : len(row.labels)] = torch.tensor(row.labels)
        with torch.no_grad():
            logits = model(**made, use_cache=False).logits[0, :-1]
            theirs = F.cross_entropy(logits, labels[0, 1:], reduction="sum")
            torch.testing.assert_close(task.loss_sum(model, task.collate([row])), theirs)


def test_rows_say_how_much_of_a_video_is_shown(tmp_path: Path) -> None:
    model, _ = FAMILIES["qwen2_vl"].build()
    config = ImageTextConfig(video_frames=6)
    task = config.on(model, watching("Qwen2VL", "Qwen2VL"), DataConfig(train="", max_length=None))
    first, second = rows_of(task, tmp_path)
    assert first.sizes == ("6 of 50 frames, 64x48",)
    assert second.sizes == ("6 of 7 frames, 32x32", "9x12")
    assert "[video 6 of 50 frames, 64x48: 36 tokens]" in task.spans(first)[0][1]
    assert task.collate([first])["video_grid_thw"].tolist() == [[3, 6, 8]]
    assert task.bucket_key(first) != task.bucket_key(second)


def test_a_model_that_watches_nothing_refuses_a_video_by_name(tmp_path: Path) -> None:
    model, processor = FAMILIES["llava"].build()
    task = ImageTextConfig().on(model, processor, DataConfig(train="", max_length=None))
    with pytest.raises(DataError, match=r"video 1 of .*rows.jsonl:1(.|\n)*takes no videos"):
        rows_of(task, tmp_path)
