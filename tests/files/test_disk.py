"""Files are read with suspicion and written whole or not at all."""

import os
import resource
import stat
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save as library_save
from torch import Tensor

from peftkit.errors import AdapterError, CheckpointError, OutputError, RunError
from peftkit.files import disk
from peftkit.files.strict_json import MAX_DEPTH, parse_json
from peftkit.files.tensors import (
    TensorSpec,
    is_finite,
    read_tensors,
    write_tensor_stream,
    write_tensors,
)

TENSORS = {
    "b.half": torch.linspace(-1, 1, 9).to(torch.float16),
    "a.brain": torch.linspace(-2, 2, 15).to(torch.bfloat16).reshape(3, 5),
    "a.single": torch.arange(12.0).reshape(2, 2, 3),
    "z.scalar": torch.tensor(3.5),
    "state": torch.arange(7, dtype=torch.uint8),
    "step": torch.tensor([1, -2]),
    "mask": torch.tensor([True, False]),
    "eighth": torch.ones(4).to(torch.float8_e4m3fn),
    "other": torch.ones(4).to(torch.float8_e5m2fnuz),
    "none": torch.zeros(0, 4),
}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def test_tensors_are_written_byte_for_byte_as_the_library_writes_them(tmp_path):
    write_tensors(TENSORS, tmp_path / "t.safetensors", {"format": "pt"})
    expected = library_save(TENSORS, {"format": "pt"})
    assert (tmp_path / "t.safetensors").read_bytes() == expected


def test_tensors_written_by_the_library_are_read_back_equal(tmp_path):
    (tmp_path / "t").write_bytes(library_save(TENSORS))
    read = read_tensors(tmp_path / "t")
    assert same(read, TENSORS)
    read["a.single"].zero_()  # own memory: the file is not behind it
    assert same(read_tensors(tmp_path / "t"), TENSORS)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.bfloat16),
        (float("-inf"), torch.float8_e5m2),
    ],
)
def test_non_finite_tensors_are_named(tmp_path, value, dtype):
    path = tmp_path / "t"
    path.write_bytes(b"old")
    bad = torch.zeros(5)
    bad[3] = value
    with pytest.raises(RunError, match=r"NaN or Infinity: lora\.bad"):
        write_tensors({"fine": torch.ones(2), "lora.bad": bad.to(dtype)}, path)
    assert path.read_bytes() == b"old"


def test_an_empty_set_of_tensors_is_refused(tmp_path):
    with pytest.raises(RunError, match="no tensors"):
        write_tensors({}, tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_permissions_are_those_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        disk.write_json({"a": 1}, tmp_path / "t")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o640


def test_a_symbolic_link_is_neither_followed_nor_replaced(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(OutputError, match="symbolic link"):
        disk.write_text("new", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "kept"


def test_a_folder_or_fifo_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("folder", "fifo"):
        with pytest.raises(OutputError, match="not a regular file"):
            disk.write_text("new", tmp_path / name)
        with pytest.raises(AdapterError, match=r"It is a f"):
            disk.read_json(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "folder"]


def test_a_symbolic_link_may_be_read(tmp_path):
    disk.write_json({"a": [1, 2.5, None]}, tmp_path / "t")
    (tmp_path / "link").symlink_to("t")
    assert disk.read_json(tmp_path / "link") == {"a": [1, 2.5, None]}


def test_a_missing_file_raises_the_error_that_was_asked_for(tmp_path):
    (tmp_path / "broken").symlink_to("nothing")
    with pytest.raises(CheckpointError, match="no such file"):
        read_tensors(tmp_path / "t", error=CheckpointError)
    with pytest.raises(CheckpointError, match="broken symbolic link"):
        read_tensors(tmp_path / "broken", error=CheckpointError)
    with pytest.raises(AdapterError, match="null byte"):
        read_tensors(tmp_path / "a\0b")


def test_a_failing_block_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "t"
    path.write_text("old")

    def interrupted() -> Iterator[Tensor]:
        yield torch.ones(2)
        raise KeyboardInterrupt

    specs = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (2,))]
    with pytest.raises(KeyboardInterrupt):
        write_tensor_stream(path, specs, interrupted())
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert path.read_text() == "old"


def test_a_full_disk_is_one_clear_error_and_the_old_file_stays(tmp_path):
    path = tmp_path / "t"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(RunError, match=r"disk is full: 80,072 bytes needed, [\d,]+ free"):
            write_tensors({"t": torch.ones(20_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert path.read_text() == "old"


def test_a_missing_or_taken_folder_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="No such file"):
        disk.write_text("new", tmp_path / "missing" / "t")
    with pytest.raises(OutputError, match="file of that name"):
        disk.writable_folder(tmp_path / "file")
    with pytest.raises(OutputError, match="file of that name"):
        disk.writable_folder(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_output_error(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="Permission denied"):
            disk.writable_folder(tmp_path)
        with pytest.raises(OutputError, match="Permission denied"):
            disk.write_text("new", tmp_path / "t")
    finally:
        tmp_path.chmod(0o700)


def test_numbers_that_json_does_not_have_are_not_written(tmp_path):
    with pytest.raises(RunError, match="not JSON compliant"):
        disk.write_json({"loss": float("nan")}, tmp_path / "t")
    assert not list(tmp_path.iterdir())


BAD_JSON = {
    "empty": (b"", "empty"),
    "duplicate key": (b'{"r": 8, "r": 4}', "'r' is given twice"),
    "duplicate key inside": (b'{"a": [{"b": 1, "b": 2}]}', "'b' is given twice"),
    "NaN": (b'{"r": NaN}', "NaN is not"),
    "out of range": (b'{"r": 1e999}', "out of range"),
    "long integer": (b'{"r": ' + b"9" * 100_000 + b"}", "does not fit 64 bits"),
    "deep": (b'{"r": ' + b"[" * 500_000, "deep"),
    "list": (b"[1]", "a list, not an object"),
    "BOM": (b'\xef\xbb\xbf{"r": 8}', "byte order mark"),
    "UTF-16": ('{"r": 8}'.encode("utf-16"), "UTF-16"),
    "Latin-1": ('{"r": "é"}'.encode("latin-1"), "Byte 7 is not UTF-8"),
    "surrogate": (b'{"r": "\\ud800"}', "surrogate"),
    "cut short": (b'{"r": 8', "line 1, column 8"),
    "trailing comma": (b'{"r": 8,}', "line 1, column"),
    "more behind": (b'{"r": 8} {}', "Extra data"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_not_strict_is_refused(name):
    data, reason = BAD_JSON[name]
    with pytest.raises(AdapterError, match=reason) as caught:
        parse_json(data, "cannot read it")
    assert len(str(caught.value)) < 400


def test_strict_json_reads_what_json_can_say():
    nested: object = 1
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    data = b'{"a": "[{\\\\\\"\\ud83d\\ude00", "b": [-1, 2.5e-3, true, null, {}], "c": %s}'
    value = parse_json(data % str(nested).encode(), "cannot read it")
    assert value == {"a": '[{\\"\N{GRINNING FACE}', "b": [-1, 0.0025, True, None, {}], "c": nested}


def test_a_large_json_file_is_refused_before_it_is_read(tmp_path):
    with open(tmp_path / "t", "wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(AdapterError, match="larger than 1,048,576 bytes"):
        disk.read_json(tmp_path / "t")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64, torch.int8])
def test_any_kind_of_tensor_can_be_asked_whether_it_is_finite(dtype):
    tensor = torch.arange(20).reshape(4, 5).to(dtype)
    assert is_finite(tensor)
    assert is_finite(tensor[:0])
    assert is_finite(tensor.t())
    if dtype != torch.int8:
        tensor[2, 1] = float("nan")
        assert not is_finite(tensor)
        tensor[2, 1] = float("-inf")
        assert not is_finite(tensor.t())
