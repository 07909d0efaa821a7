"""A hostile or damaged adapter file is one typed error, in bounded time and memory."""

import io
import json
import os
import pickle
import time
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as library_save

from peftkit.errors import AdapterError
from peftkit.files.tensors import DTYPES
from peftkit.formats import guard
from peftkit.formats.guard import check_safetensors, file_kind, read_json, read_tensors

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def file_of(header: object, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(start: int, end: int, shape: object = (4,), dtype: object = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refusal(path: Path) -> str:
    """Return the message with which a file is refused, having watched time and memory."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(AdapterError) as caught:
            read_tensors(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 5
    assert len(str(caught.value)) < 1500
    return str(caught.value)


def test_an_adapter_is_read_as_it_was_saved(tmp_path):
    tensors = {A: torch.randn(4, 9), B: torch.randn(41, 4).bfloat16()}
    (tmp_path / "t").write_bytes(library_save(tensors, {"format": "pt"}))
    read = read_tensors(tmp_path / "t")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[n], tensors[n]) and read[n].dtype == tensors[n].dtype for n in read)
    assert check_safetensors(tmp_path / "t").metadata == {"format": "pt"}


HUGE = 2**64 - 1
LENGTHS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "7 bytes": (b"\2\0\0\0\0\0\0", "7 bytes"),
    "8 bytes": (b"\0\0\0\0\0\0\0\0", "JSON"),
    "n = 2^64-1": (HUGE.to_bytes(8, "little") + b"{}", "18,446,744,073,709,551,615 bytes"),
    "n > file": (file_of({A: entry(0, 16)}, bytes(16))[:60], "the file has 60"),
    "n = 1": (b"\1\0\0\0\0\0\0\0{", "JSON"),
}


def test_a_header_over_the_limit_is_refused_before_it_is_read(tmp_path):
    length = guard.MAX_HEADER_BYTES + 1
    with open(tmp_path / "t", "wb") as file:
        file.write(length.to_bytes(8, "little") + b"{")
        file.truncate(8 + length)
    assert f"Its header has {length:,} bytes" in refusal(tmp_path / "t")


ENTRY = json.dumps(entry(0, 48, [12])).encode()
HEADERS: dict[str, tuple[object, str]] = {
    "overlap": ({A: entry(0, 16), B: entry(8, 24)}, "offset"),
    "hole": ({A: entry(0, 16), B: entry(24, 40)}, "offset"),
    "negative offset": ({A: entry(-16, 0)}, "JSON"),
    "beyond the file": ({A: entry(0, 64, [16])}, "not fully covered"),
    "trailing bytes": ({A: entry(0, 16)}, "not fully covered"),
    "offset beyond 64 bits": ({A: entry(0, 2**70)}, "JSON"),
    "shape not bytes": ({A: entry(0, 48, [4])}, "invalid shape"),
    "negative shape": ({A: entry(0, 16, [-4])}, "JSON"),
    "shape overflow to 16": ({A: entry(0, 16, [2**62 + 1, 4])}, "overflow"),
    "many dimensions": ({A: entry(0, 48, [1] * 1_000 + [12])}, "has the shape (1, 1"),
    "a huge empty shape": (
        {A: entry(0, 0, [0, 2**63]), B: entry(0, 48, [12])},
        "has the shape (0,",
    ),
    "bool in the shape": ({A: entry(0, 4, [True])}, "JSON"),
    "no offsets": ({A: {"dtype": "F32", "shape": [4]}}, "JSON"),
    "unknown dtype": ({A: entry(0, 16, dtype="F31")}, "F31"),
    "integer dtype": ({A: entry(0, 48, [12], "I32")}, "dtype I32"),
    "five dimensions": ({A: entry(0, 48, [12, 1, 1, 1, 1])}, "shape (12, 1, 1, 1, 1)"),
    "no numbers": ({A: entry(0, 0, [0, 4]), B: entry(0, 48, [12])}, "shape (0, 4)"),
    "empty name": ({"": entry(0, 48, [12])}, "the tensor name ''"),
    "path as a name": ({"../../x": entry(0, 48, [12])}, "the tensor name '../../x'"),
    "long name": ({"a" * 100_000: entry(0, 48, [12])}, "the tensor name 'aaa"),
    "many bad names": ({f"{i}/": entry(i * 4, i * 4 + 4, [1]) for i in range(12)}, "and 7 more"),
    "no tensors": ({}, "not fully covered"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, A: entry(0, 48, [12])}, "JSON"),
    "not UTF-8": (b'{"\xff": 1}', "UTF-8"),
    "duplicate tensor": (b'{"a": %b, "a": %b}' % (ENTRY, ENTRY), "twice"),
    "deep": (b'{"a":' * 50_000, "recursion"),
    "NaN": (b'{"a": NaN}', "JSON"),
}


def test_an_unsupported_dtype_is_refused(tmp_path, monkeypatch):
    (tmp_path / "t").write_bytes(file_of({A: entry(0, 16, [16], "F8_E4M3FNUZ")}, bytes(16)))
    assert "F8_E4M3FNUZ; one of" in refusal(tmp_path / "t")
    monkeypatch.delitem(DTYPES, "F8_E4M3FNUZ")
    assert "the unknown dtype F8_E4M3FNUZ" in refusal(tmp_path / "t")


def test_too_many_tensors_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "MAX_TENSORS", 500)
    many = {f"t{i}": entry(2 * i, 2 * i + 2, [1], "F16") for i in range(guard.MAX_TENSORS + 1)}
    (tmp_path / "t").write_bytes(file_of(many, bytes(2 * len(many))))
    with pytest.raises(AdapterError, match="501 tensors"):
        read_tensors(tmp_path / "t")


def test_a_payload_over_the_limit_is_refused_before_it_is_read(tmp_path):
    num = 1 << 40  # a sparse file of 2 TiB
    with open(tmp_path / "t", "wb") as file:
        header = file_of({A: entry(0, 2 * num, [num], "F16")})
        file.write(header)
        file.truncate(len(header) + 2 * num)
    assert "more than 17,179,869,184 bytes" in refusal(tmp_path / "t")


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float16), (float("inf"), torch.bfloat16)]
)
def test_non_finite_tensors_are_refused(tmp_path, value, dtype):
    bad = torch.ones(3, 3)
    bad[2, 2] = value
    (tmp_path / "t").write_bytes(library_save({A: torch.ones(2), B: bad.to(dtype)}))
    assert f"1 of 2 tensors hold NaN or Infinity, such as {B}" in refusal(tmp_path / "t")


@pytest.mark.parametrize("keep", [0.3, 0.99])
def test_a_file_cut_short_is_refused(tmp_path, keep):
    whole = library_save({A: torch.ones(4, 9), B: torch.ones(9, 4)})
    (tmp_path / "t").write_bytes(whole[: int(len(whole) * keep)])
    assert refusal(tmp_path / "t")


def zip_bytes(members: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
KINDS: dict[str, tuple[bytes, str]] = {
    "zip": (zip_bytes({"a.txt": b"a"}), "a zip archive"),
    "git-lfs": (LFS, "git lfs pull"),
    "HTML": (b"\n<!DOCTYPE html><html><body>404</body></html>", "a web page"),
    "JSON error": (b'{"error": "Repository not found"}', "JSON text"),
    "text": (b"Entry not found", "text: 'Entry not found'"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(32), "a GGUF file"),
    "gzip": (b"\x1f\x8b\x08\0" + bytes(32), "a gzip archive"),
    "tar": (b"adapter/".ljust(257, b"\0") + b"ustar\0", "a tar archive"),
    "noise": (bytes(range(255, 100, -1)), "bytes"),
}


FALSE = LENGTHS | {n: (file_of(h, bytes(48)), reason) for n, (h, reason) in HEADERS.items()} | KINDS


@pytest.mark.parametrize("name", FALSE)
def test_a_false_length_header_or_kind_of_file_is_refused_for_what_it_is(tmp_path, name):
    data, reason = FALSE[name]
    (tmp_path / "t").write_bytes(data)
    assert reason in refusal(tmp_path / "t")


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_is_named_and_never_run(tmp_path, protocol):
    canary = tmp_path / "ran"
    (tmp_path / "t").write_bytes(pickle.dumps(Canary(canary), protocol))
    assert file_kind(tmp_path / "t") == guard.PICKLE
    assert "A pickle can run code" in refusal(tmp_path / "t")
    assert not canary.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_is_named_and_never_run(tmp_path, zipped):
    canary = tmp_path / "ran"
    data = {"w": torch.ones(2), "x": Canary(canary)}
    torch.save(data, tmp_path / "t", _use_new_zipfile_serialization=zipped)
    assert file_kind(tmp_path / "t") == (guard.TORCH_ARCHIVE if zipped else guard.PICKLE)
    assert "A pickle can run code" in refusal(tmp_path / "t")
    assert not canary.exists()


def test_a_header_whose_length_looks_like_another_file_is_safetensors(tmp_path):
    header = json.dumps({A: entry(0, 16)}).encode()
    padded = header + b" " * (0x8B1F - len(header))  # the length begins as gzip does
    (tmp_path / "t").write_bytes(file_of(padded, bytes(16)))
    assert file_kind(tmp_path / "t") == guard.SAFETENSORS
    assert torch.equal(read_tensors(tmp_path / "t")[A], torch.zeros(4))


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for ever
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), tmp_path / "missing"):
        assert "cannot read" in refusal(path)
        with pytest.raises(AdapterError, match="cannot read"):
            read_json(path)


@pytest.mark.parametrize("name", ["git-lfs", "HTML", "noise", "zip"])
def test_a_config_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / "t").write_bytes(KINDS[name][0])
    with pytest.raises(AdapterError, match=r"git-lfs|web page|not UTF-8|binary"):
        read_json(tmp_path / "t")
