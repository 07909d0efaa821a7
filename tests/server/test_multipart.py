"""Forms as they come: whatever the pieces, the same file; what is none, or too much, is refused."""

import io
import random

import pytest

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from peftkit_server.body import MAX_FIELD, MAX_HEAD, Form
from peftkit_server.refusals import RequestError

KIND = "multipart/form-data; boundary=xYz"
ROWS = b'{"a": 1}\r\n--xY\r\n\r\n--x--\r\n{"b": 2}\n'
"""Bytes with beginnings of a boundary in them."""


def form(*parts: tuple[str, bytes], end: bytes = b"--xYz--\r\n") -> bytes:
    heads = (
        f"--xYz\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() for head, _ in parts
    )
    bodies = (body + b"\r\n" for _, body in parts)
    return b"".join(head + body for head, body in zip(heads, bodies, strict=True)) + end


USUAL = form(('name="purpose"', b"fine-tune"), ('name="file"; filename="rows.jsonl"', ROWS))


def taken(data: bytes, *sizes: int, kind: str = KIND, most: int = 1000) -> tuple[bytes, Form]:
    file = io.BytesIO()
    upload = Form(kind, file, most)
    pieces, at = [*sizes, len(data)], 0
    for size in pieces:
        upload.feed(data[at : at + size])
        at += size
    upload.close()
    return file.getvalue(), upload


@pytest.mark.parametrize("seed", range(8))
def test_a_form_is_the_same_in_any_pieces(seed):
    chance = random.Random(seed)
    most = chance.choice([1, 3, 40])
    sizes = [chance.randint(0, most) for _ in range(2 * len(USUAL) // most)]
    content, upload = taken(USUAL, *sizes)
    assert content == ROWS
    assert upload.fields == {"purpose": "fine-tune"}
    assert (upload.filename, upload.num_bytes) == ("rows.jsonl", len(ROWS))


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ('name="file"; filename="../../etc/passwd"', "../../etc/passwd"),
        ('name="file"', "upload"),
        ('name="file"; filename=""', "upload"),
        ("name=\"file\"; filename*=UTF-8''r%C3%A4.jsonl", "rä.jsonl"),
        ('name="file"; filename="rä.jsonl"', "rä.jsonl"),
        ("name=\"file\"; filename*=UTF-8''%ff", "\N{REPLACEMENT CHARACTER}"),
        (f'name="file"; filename="{"a" * 300}"', "a" * 255),
    ],
)
def test_the_name_of_a_file_is_only_told(head, name):
    assert taken(form((head, b"x")))[1].filename == name


def test_what_stands_before_and_after_is_left_out_and_a_file_may_be_empty():
    content, upload = taken(
        b"preamble\r\n" + form(('name="file"; filename="a"', b"")) + b"and after"
    )
    assert (content, upload.filename) == (b"", "a")


@pytest.mark.parametrize(
    ("data", "kind", "told"),
    [
        (USUAL, "application/json", "an upload must be multipart/form-data"),
        (USUAL, "multipart/form-data", "with a boundary"),
        (USUAL, "", "Content-Type: none"),
        (USUAL, "multipart/form-data; boundary=other", "was cut short"),
        (USUAL[:-20], KIND, "was cut short"),
        (b"", KIND, "was cut short"),
        (form(('name="purpose"', b"x")), KIND, "has no file"),
        (form(('filename="x"', b"x")), KIND, "a part without a name"),
        (form(('name="a"', b"x"), ('name="a"', b"y")), KIND, "two parts with the same name"),
        (form(*[(f'name="{n}"', b"") for n in range(20)]), KIND, "or over 16 parts"),
        (form(('name="file"', b"x"), ('name="file"', b"y")), KIND, "two parts with the same name"),
        (form(('name="purpose"', b"x" * (MAX_FIELD + 1))), KIND, "too long"),
        (form(('name="file"', b"x" * 1001)), KIND, "too long"),
        (form((f'name="{"x" * MAX_HEAD}"', b"x")), KIND, "headers are too long"),
        (form((f'name="{"x" * MAX_HEAD}', b"x"))[:-40], KIND, "headers are too long"),
        (b"x" * (MAX_FIELD + 20), KIND, "too long"),
        (form(("name*=nothing''x", b"x")), KIND, "without a name"),
    ],
)
def test_what_is_no_form_is_refused(data, kind, told):
    with pytest.raises(RequestError, match=told) as error:
        taken(data, 7, 1, 400, kind=kind)
    assert error.value.status == (413 if told == "too long" else 400)
