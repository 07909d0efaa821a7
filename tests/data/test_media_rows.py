"""Rows that hold images: where these stand, where they are read, and what is refused of them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from peftkit.data import media
from peftkit.data.format import Conversation
from peftkit.data.load import Record, read_records
from peftkit.data.media import Picture
from peftkit.data.media_text import parse_with_media
from peftkit.errors import DataError
from tests.vision import png, said

SEEN = ("assistant", "a fox")


def parsed(tmp_path: Path, row: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Return the contents of a row's messages, and what its pictures are."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    found, pictures = parse_with_media(read_records(str(path)), "auto", where=str(path))
    (example,) = found.examples
    if isinstance(example, Conversation):
        return [message["content"] for message in example.messages], [p.data for p in pictures[0]]
    texts = [getattr(example, n, "") for n in ("request", "prompt", "output", "completion")]
    return [text for text in texts if text], [p.data for p in pictures[0]]


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
def test_images_stand_where_their_parts_do(part: dict[str, Any], tmp_path: Path) -> None:
    content = [{"type": "text", "text": "see "}, part, {"type": "text", "text": " this"}]
    row: dict[str, Any] = {"messages": said(("user", content), SEEN)}
    if part == {"type": "image"}:
        row["images"] = ["a.png"]
    assert parsed(tmp_path, row) == ([f"see {Picture.mark} this", "a fox"], [tmp_path / "a.png"])


def test_images_of_several_turns_keep_their_order(tmp_path: Path) -> None:
    turns = said(
        ("user", "<image> and <image>"),
        SEEN,
        ("user", [{"type": "text", "text": "<image>"}, {"type": "image", "image": URL}]),
        SEEN,
    )
    texts, found = parsed(tmp_path, {"messages": turns, "images": ["1.png", "2.png", "3.png"]})
    assert texts == [f"{Picture.mark} and {Picture.mark}", "a fox", Picture.mark * 2, "a fox"]
    assert found == [*(tmp_path / f"{n}.png" for n in (1, 2, 3)), URL]


def test_llavas_own_rows_are_read(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a fox"}]
    row = {"id": "7", "image": "coco/7.jpg", "conversations": turns}
    assert parsed(tmp_path, row) == (
        [f"{Picture.mark}\nwhat?", "a fox"],
        [tmp_path / "coco" / "7.jpg"],
    )


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said(("system", "be short"), ("user", "what?"), SEEN)},
        {"question": "what?", "answer": "a fox"},
        {"instruction": "what?", "output": "a fox"},
        {"prompt": "what?", "completion": "a fox"},
        {"prompt": said(("user", "what?")), "completion": said(SEEN)},
    ],
)
def test_images_without_marks_begin_the_question(row: dict[str, Any], tmp_path: Path) -> None:
    texts, found = parsed(tmp_path, {**row, "images": ["a.png", {"path": "/b.png"}]})
    assert texts[-2:] == [f"{Picture.mark * 2}what?", "a fox"]
    assert found == [tmp_path / "a.png", Path("/b.png")]


def test_bytes_of_a_data_set_are_images() -> None:
    record = Record(
        {"image": {"bytes": png(), "path": None}, "question": "a", "answer": "b"}, "x:1"
    )
    _, ((found,),) = parse_with_media([record], "auto", where="x")
    assert found.decode().size == (9, 12)
    coded = {"type": "image", "base64": base64.b64encode(png()).decode()}
    record = Record({"messages": said(("user", [coded]), SEEN)}, "x:1")
    _, ((found,),) = parse_with_media([record], "auto", where="x")
    assert found.decode().size == (9, 12)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": said(("user", "<image> <image>"), SEEN), "images": ["a"]}, "image 2.*has 1"),
        (
            {"messages": said(("user", "<image>"), SEEN), "images": ["a"] * 3},
            "3 images, and 1 mark",
        ),
        ({"messages": said(("user", "<image>"), SEEN)}, "the row has 0"),
        ({"messages": said(("system", "<image>"), ("user", "a"), SEEN), "image": "a"}, "system"),
        ({"messages": said(("user", "a"), ("assistant", "<image>")), "image": "a"}, "assistant"),
        ({"prompt": "a", "completion": "<image>", "image": "a"}, "in the answer"),
        ({"text": "a", "image": "a"}, "no question or prompt"),
        ({"text": "a"}, "a text alone"),
        ({"messages": said(("user", [{"type": "smell"}]), SEEN)}, "found 'smell'"),
        ({"messages": said(("user", "a"), SEEN), "image": 3}, "images?.0.*a value"),
        ({"messages": said(("user", "a"), SEEN), "image": "a", "images": ["b"]}, "leave one"),
        ({"messages": said(("user", f"a {Picture.mark}"), SEEN)}, "stands for a medium"),
        (
            {"messages": said(("user", [{"type": "image", "image": "https://x.org/a.png"}]), SEEN)},
            "Cannot use image 1 of .*(.|\n)*nothing is fetched",
        ),
    ],
)
def test_rows_that_cannot_be_are_named(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    import re

    assert re.search(words, refused(tmp_path, row))


def file(image: Image.Image, kind: str, **more: Any) -> bytes:
    stored = io.BytesIO()
    image.save(stored, kind, **more)
    return stored.getvalue()


def bomb() -> bytes:
    """Return a PNG of a few bytes that says it has 50,000 x 50,000 pixels."""
    import struct
    import zlib

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
def test_hostile_images_are_named_with_their_row(name: str, tmp_path: Path) -> None:
    import re

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


def test_images_that_are_not_there_or_too_long_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"image of a:1(.|\n)*gone.png"):
        Picture(tmp_path / "gone.png", "a:1").decode()
    with pytest.raises(DataError, match="It is no file"):
        Picture(Path("/dev/zero"), "a:1").decode()
    with pytest.raises(DataError, match="data URL"):
        Picture("data:;base64,!!!", "a:1").decode()
    monkeypatch.setattr(media, "MAX_BYTES", 50)
    (tmp_path / "a.png").write_bytes(png())
    for stored in (png(), tmp_path / "a.png", URL):
        with pytest.raises(DataError, match=r"bytes, more than 50(.|\n)*smaller"):
            Picture(stored, "a:1").decode()


def test_large_images_are_scaled_in_proportion() -> None:
    small = Picture(png(size=(40, 10)), "a:1").decode(max_pixels=100)
    assert small.size == (20, 5)
    assert Picture(png(size=(40, 10)), "a:1").decode(max_pixels=400).size == (40, 10)
