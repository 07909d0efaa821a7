"""Messages are valid protobuf; invalid ones are refused before they are parsed."""

import struct
from typing import Any

import pytest
import torch

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit_server.refusals import RequestError
from peftkit_server.tinker import wire


def field(number: int, content: bytes) -> bytes:
    """Return a bytes field in wire format."""
    size, head = len(content), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + content


def test_a_request_has_the_bytes_that_tinker_writes():
    tokens = struct.pack("<3i", 5, 6, 300)
    targets = struct.pack("<3q", 6, 300, 7)
    weights = struct.pack("<3f", 0.0, 1.0, 0.5)
    tensors = [
        field(2, field(1, name) + field(2, field(1, values) + bytes([3 << 3, dtype, 4 << 3, 3])))
        for name, values, dtype in ((b"target_tokens", targets, 2), (b"weights", weights, 1))
    ]
    one = field(1, field(1, field(1, tokens))) + b"".join(tensors)
    low = field(1, b"clip_low_threshold") + field(2, b"\x09" + struct.pack("<d", 0.9))
    whole = field(1, b"s:train:0") + b"\x10\x07" + field(3, one) + field(4, b"ppo") + b"\x30\x01"
    found = wire.parsed("ForwardBackward", whole + field(7, low))
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == (
        *("s:train:0", 7, "ppo"),
        True,
    )
    assert found.config["clip_low_threshold"].number == 0.9
    inputs = {name: wire.tensor_of(each, name) for name, each in found.data[0].inputs.items()}
    assert torch.equal(inputs["target_tokens"], torch.tensor([6, 300, 7]))
    assert torch.equal(inputs["weights"], torch.tensor([0.0, 1.0, 0.5]))
    assert found.data[0].chunks[0].text.tokens == tokens


def test_a_sparse_tensor_is_read_as_a_dense_one():
    tensor = wire.MESSAGES["Tensor"](dtype=1, shape=[3, 4])
    tensor.sparse.values = struct.pack("<3f", 1.0, 2.0, 3.0)
    tensor.sparse.rows, tensor.sparse.columns = (
        struct.pack("<4q", 0, 2, 2, 3),
        struct.pack("<3q", 3, 0, 1),
    )
    expected = torch.tensor([[2.0, 0, 0, 1], [0, 0, 0, 0], [0, 3, 0, 0]])
    assert torch.equal(wire.tensor_of(tensor, "weights"), expected)


def test_an_output_has_a_record_for_datums_of_one_shape():
    rows = [torch.ones(2), torch.zeros(3), torch.ones(2, 4), torch.ones(1)]
    out = wire.parsed(
        "ForwardBackwardOutput", wire.output_of([{"logprobs": row} for row in rows], {"a:sum": 1})
    )
    assert [record.num_datums for record in out.records] == [2, 1, 1]
    shapes = [[*record.fields["logprobs"].trailing_shape] for record in out.records]
    assert shapes == [[], [4], []]
    assert out.records[0].fields["logprobs"].offsets == struct.pack("<3q", 0, 8, 20)
    assert dict(out.metrics) == {"a:sum": 1.0}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x0a\xff\xff\xff\xff\x0f", "truncated"),
        (b"\x0a\x05abc", "truncated"),
        (b"\x80" * 20, "no end"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x0a\x02\xff\xfe", "protobuf"),  # a text that is not UTF-8
        (field(3, field(1, b"\x0a\x7f")), "truncated"),
        (b"\x00\x01", "protobuf"),
    ],
    ids=["too long", "cut", "number", "group", "text", "nested", "tag 0"],
)
def test_what_is_no_message_is_refused(data, words):
    with pytest.raises(RequestError, match=words):
        wire.parsed("ForwardBackward", data)


@pytest.mark.parametrize(
    "data",
    [field(3, b"") * 500_000, field(3, field(2, b"") * 500_000), b"\x10\x01" * 500_000],
    ids=["datums", "tensors", "numbers"],
)
def test_too_many_fields_are_not_parsed(data, monkeypatch):
    monkeypatch.setitem(wire.MESSAGES, "ForwardBackward", None)
    with pytest.raises(RequestError, match="more than 400,000 fields"):
        wire.parsed("ForwardBackward", data)


def test_packed_numbers_count_as_fields():
    shape = field(4, b"\x01" * 500_000)
    with pytest.raises(RequestError, match="more than 400,000 fields"):
        wire.parsed("Tensor", shape)


def tensor(**fields: Any) -> Any:
    return wire.MESSAGES["Tensor"](**fields)


def csr(rows: list[int], columns: list[int], values: list[float]) -> Any:
    return wire.MESSAGES["Csr"](
        rows=wire.bytes_of(rows, torch.int64),
        columns=wire.bytes_of(columns, torch.int64),
        values=wire.bytes_of(values),
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (tensor(dense=b"1234", dtype=9), "dtype is 9"),
        (tensor(dense=b"123", dtype=1), "not a multiple of 4"),
        (tensor(dense=b"1234", dtype=1, shape=[2]), "1 values, but the shape"),
        (tensor(dense=b"1234", dtype=1, shape=[-1]), "shape is"),
        (tensor(dense=b"1234", dtype=1, shape=[1, 1, 1]), "shape is"),
        (tensor(dense=b"1234", dtype=1, shape=[1 << 40]), "shape is"),
        (tensor(sparse=csr([0], [], []), dtype=1, shape=[1 << 20, 1 << 20]), "sparse, with"),
        (tensor(sparse=csr([0, 1], [0], [1.0]), dtype=1, shape=[1]), "sparse, with"),
        (tensor(sparse=csr([0, 1], [2], [1.0]), dtype=1, shape=[1, 2]), "column is out"),
        (tensor(sparse=csr([0, 1], [-1], [1.0]), dtype=1, shape=[1, 2]), "column is out"),
        (tensor(sparse=csr([0, 2], [0], [1.0]), dtype=1, shape=[1, 2]), "sparse rows"),
        (tensor(sparse=csr([0, 2, 1], [0], [1.0]), dtype=1, shape=[2, 2]), "sparse rows"),
        (tensor(sparse=csr([1, 1], [0], [1.0]), dtype=1, shape=[1, 2]), "sparse rows"),
        (tensor(sparse=csr([], [], []), dtype=1, shape=[0, 2]), "sparse rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_that_contradicts_itself_is_refused(wrong, words):
    with pytest.raises(RequestError, match=words):
        wire.tensor_of(wrong, "weights")


def test_the_messages_live_beside_others_of_their_names():
    from google.protobuf import descriptor_pool

    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("peftkit.Tensor")
