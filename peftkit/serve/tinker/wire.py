"""Tinker's messages in the wire format of protobuf, made from a table, and the tensors in them.

What travels are field numbers and types; the names are ours. The messages are in a pool of their
own, so that Tinker's client may be in the same process.

Shapes: N tokens of a datum, K targets of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

from peftkit.serve.requests import RequestError

TABLE = """
Csr: values bytes 1, rows bytes 2, columns bytes 3
Tensor: dense bytes 1, sparse Csr 2, dtype int32 3, shape *int64 4
BatchedTensor: data bytes 1, offsets bytes 2, dtype int32 3, trailing_shape *int64 4
ArrayRecord: type_tag string 1, fields {BatchedTensor} 2, num_datums int64 3
ForwardBackwardOutput: type string 1, records *ArrayRecord 2, metrics {double} 3
Setting: number double 1, text string 2
Text: tokens bytes 1
Chunk: text Text 1, image bytes 2, sound bytes 3
Datum: chunks *Chunk 1, inputs {Tensor} 2
ForwardBackward: model_id string 1, seq_id int32 2, data *Datum 3, loss string 4, \
old_config {double} 5, forward_only bool 6, config {Setting} 7
Topk: ids bytes 1, log_probs bytes 2, k uint32 3, length uint32 4
Sequence: stop_reason int32 1, tokens bytes 2, log_probs bytes 3, topk Topk 4
Sampled: sequences *Sequence 1, prompt_log_probs bytes 2, topk_prompt Topk 3, cache_hits int32 4
"""
"""A message in a line. A field: name, type, number; *type: repeated; {type}: a map from strings."""

STOP, LENGTH = 0, 1
"""`Sequence.stop_reason`."""
DTYPES = {1: torch.float32, 2: torch.int64, 3: torch.int32}
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
MAX_FIELDS = 400_000
"""Fields of a message with those of all in it: counted before it is parsed."""
MAX_CELLS = 1 << 24
"""Values of one tensor."""

_SCALARS = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bytes", "string", "int32", "int64", "uint32", "double", "bool")
}
_TYPES: dict[str, dict[int, str]] = {}
"""By message, or entry of a map: the type of each field, by its number."""


def _messages() -> dict[str, Any]:
    names = {"name": "peftkit.proto", "package": "peftkit"}
    file = descriptor_pb2.FileDescriptorProto(**names, syntax="proto3")  # checks texts
    for line in TABLE.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        _TYPES[name] = {}
        for field in fields.split(", "):
            own, kind, number = field.split()
            is_many = kind[0] in "*{"
            if kind[0] == "{":
                entry = message.nested_type.add(name=f"{own.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _add(entry, f"{name}.{entry.name}", "key", "string", 1)
                _add(entry, f"{name}.{entry.name}", "value", kind[1:-1], 2)
                kind = f"{name}.{entry.name}"
            _add(message, name, own, kind.lstrip("*"), int(number), is_many=is_many)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        each.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"peftkit.{each.name}")
        )
        for each in file.message_type
    }


def _add(
    message: Any, name: str, own: str, kind: str, number: int, *, is_many: bool = False
) -> None:
    field = message.field.add(name=own, number=number, label=3 if is_many else 1)
    field.type = _SCALARS.get(kind, 11)
    if kind not in _SCALARS:
        field.type_name = f".peftkit.{kind}"
    _TYPES.setdefault(name, {})[number] = kind


MESSAGES = _messages()


def parsed(name: str, data: bytes) -> Any:
    """Return a message; its fields are counted first.

    Raises:
        RequestError: It is none of this type, or has too many fields.
    """
    _check(name, data)
    try:
        return MESSAGES[name].FromString(data)
    except DecodeError as problem:
        raise _unreadable(str(problem)) from None


def _check(name: str, data: bytes) -> None:
    """Walk through a message without making anything of it."""
    count, waiting = 0, [(name, 0, len(data))]
    while waiting:
        name, place, end = waiting.pop()
        kinds = _TYPES[name]
        while place < end:
            tag, place = _number(data, place, end)
            count, size = count + 1, {1: 8, 5: 4}.get(tag & 7, 0)
            if tag & 7 == 0:
                _, place = _number(data, place, end)
            elif tag & 7 == 2:
                size, place = _number(data, place, end)
                kind = kinds.get(tag >> 3, "bytes")
                if kind in _TYPES:
                    waiting.append((kind, place, place + size))
                elif kind not in ("bytes", "string"):  # many numbers in one field
                    count += size
            elif not size:
                raise _unreadable(f"there is a field of the type {tag & 7}")
            place += size
            if place > end:
                raise _unreadable("it is cut short")
            if count > MAX_FIELDS:
                raise _unreadable(f"it has more than {MAX_FIELDS:,} fields")


def _number(data: bytes, place: int, end: int) -> tuple[int, int]:
    """Return a number of variable length, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = data[place]
        place, value = place + 1, value | (byte & 127) << shift
        if byte < 128:
            return value, place
    raise _unreadable("a number has no end")


def _unreadable(why: str) -> RequestError:
    return RequestError("the request's body cannot be read.", found=f"As protobuf: {why}.")


def tensor_of(message: Any, name: str) -> Tensor:
    """Return the tensor of a `Tensor` message: (N,) or (N, K).

    Raises:
        RequestError: Bytes, shape and indices do not agree, or it is too large.
    """
    dtype, shape = DTYPES.get(message.dtype), list(message.shape)
    if dtype is None:
        raise _wrong(name, f"its dtype is {message.dtype}; known are 1 float32, 2 int64, 3 int32")
    if len(shape) > 2 or any(not 0 <= size <= MAX_CELLS for size in shape):
        raise _wrong(name, f"its shape is {shape[:4]}")
    if message.HasField("sparse"):
        return _dense_of(message.sparse, shape, dtype, name)
    values = numbers_of(message.dense, dtype, name)
    shape = shape or [len(values)]
    cells = shape[0] * (shape[1] if len(shape) > 1 else 1)
    if cells != len(values):
        raise _wrong(name, f"it has {len(values)} values, and the shape {shape}")
    return values.view(shape)


def _dense_of(csr: Any, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    rows, columns = (numbers_of(part, torch.int64, name) for part in (csr.rows, csr.columns))
    values = numbers_of(csr.values, dtype, name)
    if len(shape) != 2 or shape[0] * shape[1] > MAX_CELLS:
        raise _wrong(name, f"it is sparse, with the shape {list(shape)}")
    counts = rows.diff()
    fits = len(rows) == shape[0] + 1 and len(columns) == len(values)
    if not fits or int(rows[0]) != 0 or int(rows[-1]) != len(values) or bool((counts < 0).any()):
        raise _wrong(name, "its sparse rows are not those of its shape and values")
    if len(values) and not (int(columns.min()) >= 0 and int(columns.max()) < shape[1]):
        raise _wrong(name, "a sparse column is out of its shape")
    dense = torch.zeros(shape[0], shape[1], dtype=dtype)
    dense[torch.arange(shape[0]).repeat_interleave(counts), columns] = values
    return dense


def numbers_of(data: bytes, dtype: torch.dtype, name: str) -> Tensor:
    """Return the numbers in bytes.

    Raises:
        RequestError: The last one is not whole.
    """
    if len(data) % dtype.itemsize:
        raise _wrong(name, f"it has {len(data)} bytes, which are no whole numbers")
    if len(data) > MAX_CELLS * dtype.itemsize:
        raise _wrong(name, f"it has more than {MAX_CELLS:,} values")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _wrong(name: str, why: str) -> RequestError:
    return RequestError(f"the tensor '{name[:40]}' cannot be read.", found=f"{why}.")


def bytes_of(values: Tensor | Iterable[float], dtype: torch.dtype = torch.float32) -> bytes:
    """Return the bytes of numbers."""
    tensor = values if isinstance(values, Tensor) else torch.tensor([*values], dtype=dtype)
    return tensor.detach().to("cpu", dtype).contiguous().numpy().tobytes()


def set_topk(message: Any, ids: Tensor, log_probs: Tensor) -> None:
    """Fill a `Topk` message with the likeliest tokens of each position, (N, K)."""
    message.ids, message.log_probs = bytes_of(ids, torch.int32), bytes_of(log_probs)
    message.length, message.k = ids.shape


def output_of(fields: Sequence[dict[str, Tensor]], metrics: dict[str, float]) -> bytes:
    """Return a `ForwardBackwardOutput`: tensors by name for each datum, (N,) or (N, K)."""
    message = MESSAGES["ForwardBackwardOutput"](type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    start = 0
    while start < len(fields):  # a record has datums of one K
        shapes = [next(iter(each.values())).shape[1:] for each in fields[start:]]
        size = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), len(shapes))
        record = message.records.add(num_datums=size)
        for name in fields[start]:
            parts = [bytes_of(each[name]) for each in fields[start : start + size]]
            sizes = torch.tensor([0, *map(len, parts)]).cumsum(0)
            record.fields[name].MergeFrom(
                MESSAGES["BatchedTensor"](
                    data=b"".join(parts),
                    offsets=bytes_of(sizes, torch.int64),
                    dtype=NUMBERS[torch.float32],
                    trailing_shape=shapes[0],
                )
            )
        start += size
    return bytes(message.SerializeToString())
