"""Tinker's protobuf messages, built from a table, and their tensors.

The wire format has field numbers and types; names are local. The messages have a separate
descriptor pool, because Tinker's client may run in the same process.

Shapes: N tokens of a datum, K targets per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

from peftkit_server.refusals import RequestError

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
Sampled: sequences *Sequence 1, prompt_log_probs bytes 2, topk_prompt Topk 3, cache_hits int32 4, \
targets Tensor 5
"""
"""One message per line. Fields: name, type, number. *type: repeated; {type}: map from strings."""

STOP, LENGTH = 0, 1
"""`Sequence.stop_reason`."""
DTYPES = {1: torch.float32, 2: torch.int64, 3: torch.int32}
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
MAX_FIELDS = 400_000
"""Most fields of a message, nested ones included; checked before it is parsed."""
MAX_CELLS = 1 << 24
"""Most values of one tensor."""

_SCALARS = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bytes", "string", "int32", "int64", "uint32", "double", "bool")
}
_TYPES: dict[str, dict[int, str]] = {}
"""Field types by number, for each message and each map entry."""


def _messages() -> dict[str, Any]:
    names = {"name": "peftkit.proto", "package": "peftkit"}
    file = descriptor_pb2.FileDescriptorProto(**names, syntax="proto3")  # validates UTF-8
    for line in TABLE.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        _TYPES[name] = {}
        for field in fields.split(", "):
            field_name, kind, number = field.split()
            is_repeated = kind[0] in "*{"
            if kind[0] == "{":
                entry = message.nested_type.add(name=f"{field_name.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _add(entry, f"{name}.{entry.name}", "key", "string", 1)
                _add(entry, f"{name}.{entry.name}", "value", kind[1:-1], 2)
                kind = f"{name}.{entry.name}"
            kind = kind.lstrip("*")
            _add(message, name, field_name, kind, int(number), is_repeated=is_repeated)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"peftkit.{message.name}")
        )
        for message in file.message_type
    }


def _add(
    message: Any, name: str, field_name: str, kind: str, number: int, *, is_repeated: bool = False
) -> None:
    field = message.field.add(name=field_name, number=number, label=3 if is_repeated else 1)
    field.type = _SCALARS.get(kind, 11)
    if kind not in _SCALARS:
        field.type_name = f".peftkit.{kind}"
    _TYPES.setdefault(name, {})[number] = kind


MESSAGES = _messages()


def parsed(name: str, data: bytes) -> Any:
    """Parse a message, after a check of its number of fields.

    Raises:
        RequestError: The data is not a message of this type, or has too many fields.
    """
    _check(name, data)
    try:
        return MESSAGES[name].FromString(data)
    except DecodeError as problem:
        raise _unreadable(str(problem)) from None


def _check(name: str, data: bytes) -> None:
    """Count the fields of a message without allocating them."""
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
                elif kind not in ("bytes", "string"):  # packed numbers
                    count += size
            elif not size:
                raise _unreadable(f"a field has the unknown wire type {tag & 7}")
            place += size
            if place > end:
                raise _unreadable("it is truncated")
            if count > MAX_FIELDS:
                raise _unreadable(f"it has more than {MAX_FIELDS:,} fields")


def _number(data: bytes, place: int, end: int) -> tuple[int, int]:
    """Return a varint, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = data[place]
        place, value = place + 1, value | (byte & 127) << shift
        if byte < 128:
            return value, place
    raise _unreadable("a number has no end")


def _unreadable(reason: str) -> RequestError:
    return RequestError("the request's body cannot be read.", found=f"As protobuf: {reason}.")


def num_cells(message: Any) -> int:
    """Return the number of values of a `Tensor` message, without making the tensor."""
    if message.HasField("sparse"):
        return prod(max(size, 0) for size in message.shape[:2])
    return len(message.dense) // 4


def tensor_of(message: Any, name: str) -> Tensor:
    """Return the tensor of a `Tensor` message, (N,) or (N, K).

    Raises:
        RequestError: Bytes, shape and indices are inconsistent, or the tensor is too large.
    """
    dtype, shape = DTYPES.get(message.dtype), list(message.shape)
    if dtype is None:
        reason = f"its dtype is {message.dtype}; supported: 1 float32, 2 int64, 3 int32"
        raise _invalid(name, reason)
    if len(shape) > 2 or any(not 0 <= size <= MAX_CELLS for size in shape):
        raise _invalid(name, f"its shape is {shape[:4]}")
    if message.HasField("sparse"):
        return _dense_of(message.sparse, shape, dtype, name)
    values = numbers_of(message.dense, dtype, name)
    shape = shape or [len(values)]
    cells = shape[0] * (shape[1] if len(shape) > 1 else 1)
    if cells != len(values):
        raise _invalid(name, f"it has {len(values)} values, but the shape {shape}")
    return values.view(shape)


def _dense_of(csr: Any, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    rows, columns = (numbers_of(part, torch.int64, name) for part in (csr.rows, csr.columns))
    values = numbers_of(csr.values, dtype, name)
    if len(shape) != 2 or shape[0] * shape[1] > MAX_CELLS:
        raise _invalid(name, f"it is sparse, with the shape {list(shape)}")
    counts = rows.diff()
    fits = len(rows) == shape[0] + 1 and len(columns) == len(values)
    if not fits or int(rows[0]) != 0 or int(rows[-1]) != len(values) or bool((counts < 0).any()):
        raise _invalid(name, "its sparse rows do not match its shape and values")
    if len(values) and not (int(columns.min()) >= 0 and int(columns.max()) < shape[1]):
        raise _invalid(name, "a sparse column is outside its shape")
    dense = torch.zeros(shape[0], shape[1], dtype=dtype)
    dense[torch.arange(shape[0]).repeat_interleave(counts), columns] = values
    return dense


def numbers_of(data: bytes, dtype: torch.dtype, name: str) -> Tensor:
    """Return bytes as a tensor of numbers.

    Raises:
        RequestError: The size is not a multiple of the item size, or there are too many numbers.
    """
    if len(data) % dtype.itemsize:
        raise _invalid(name, f"its {len(data)} bytes are not a multiple of {dtype.itemsize}")
    if len(data) > MAX_CELLS * dtype.itemsize:
        raise _invalid(name, f"it has more than {MAX_CELLS:,} values")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _invalid(name: str, reason: str) -> RequestError:
    return RequestError(f"the tensor '{name[:40]}' cannot be read.", found=f"{reason}.")


def bytes_of(values: Tensor | Iterable[float], dtype: torch.dtype = torch.float32) -> bytes:
    """Return the bytes of numbers as `dtype`."""
    tensor = values if isinstance(values, Tensor) else torch.tensor([*values], dtype=dtype)
    return tensor.detach().to("cpu", dtype).contiguous().numpy().tobytes()


def set_topk(message: Any, ids: Tensor, log_probs: Tensor) -> None:
    """Fill a `Topk` message with the top tokens of each position, both tensors (N, K)."""
    message.ids, message.log_probs = bytes_of(ids, torch.int32), bytes_of(log_probs)
    message.length, message.k = ids.shape


def output_of(fields: Sequence[dict[str, Tensor]], metrics: dict[str, float]) -> bytes:
    """Return a `ForwardBackwardOutput` of the named tensors of each datum, (N,) or (N, K)."""
    message = MESSAGES["ForwardBackwardOutput"](type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    start = 0
    while start < len(fields):  # the datums of a record have the same K
        shapes = [next(iter(tensors.values())).shape[1:] for tensors in fields[start:]]
        size = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), len(shapes))
        record = message.records.add(num_datums=size)
        for name in fields[start]:
            chunks = [bytes_of(tensors[name]) for tensors in fields[start : start + size]]
            sizes = torch.tensor([0, *map(len, chunks)]).cumsum(0)
            record.fields[name].MergeFrom(
                MESSAGES["BatchedTensor"](
                    data=b"".join(chunks),
                    offsets=bytes_of(sizes, torch.int64),
                    dtype=NUMBERS[torch.float32],
                    trailing_shape=shapes[0],
                )
            )
        start += size
    return bytes(message.SerializeToString())
