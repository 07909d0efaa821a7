"""A safetensors header, fully checked before any memory is allocated for its tensors.

Format: u64 little-endian header length, JSON header, payload
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from peftkit.errors import AdapterError, PeftkitError
from peftkit.files.strict_json import parse_json, shown

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit

# Name in the file -> bits, torch dtype (None: can be copied as bytes only). In safetensors' own
# order: it sorts the tensors of a file by it, last first, and then by name.
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (8, torch.bool),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E8M0": (8, None),
    "I16": (16, torch.int16),
    "U16": (16, torch.uint16),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "I32": (32, torch.int32),
    "U32": (32, torch.uint32),
    "F32": (32, torch.float32),
    "C64": (64, torch.complex64),
    "F64": (64, torch.float64),
    "I64": (64, torch.int64),
    "U64": (64, torch.uint64),
}
DTYPE_NAMES = {dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None}
_DTYPE_ORDER = {name: index for index, name in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's entry; `start` and `end` are bytes from the beginning of the payload."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header; `tensors` is in the order of the payload, which begins at `payload`."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    payload: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written: its name, dtype (a key of DTYPES) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the payload."""
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: the order in which safetensors writes tensors."""
        return -_DTYPE_ORDER[self.dtype], self.name


def read_header(
    path: Path,
    file: BinaryIO,
    *,
    max_bytes: int = MAX_HEADER_BYTES,
    error: type[PeftkitError] = AdapterError,
) -> Header:
    """Read and check the header of an open file; anything wrong raises `error`."""
    asked = f"cannot read {path} as safetensors"
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise error(asked, found=f"It holds {size} bytes; a header length alone takes 8.")
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise error(
            asked,
            found=f"It promises a header of {length:,} bytes; the file has {size:,}.",
            fix="The file is cut short or is not safetensors: fetch or write it again.",
        )
    if length > max_bytes:
        raise error(asked, found=f"Its header has {length:,} bytes; the limit is {max_bytes:,}.")
    text = file.read(length)
    if not text.startswith(b"{"):
        raise error(asked, found=f"Its header begins with {shown(text[:8])}, not with '{{'.")
    content = parse_json(text, f"cannot read the header of {path}", error=error)
    metadata = content.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # mlx writes null where there is none
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise error(asked, found="Its __metadata__ is not an object of strings.")
    try:
        entries = {name: _entry(name, spec) for name, spec in content.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
        _check_offsets(entries, size - 8 - length)
    except ValueError as problem:
        fix = "The file is damaged: fetch or write it again."
        raise error(asked, found=str(problem), fix=fix) from None
    return Header(entries, metadata, 8 + length)


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """Return length and header for tensors that follow one another in the order of `specs`."""
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    position = 0
    for spec in specs:
        end = position + spec.num_bytes
        content[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # keeps the payload aligned
    return len(text).to_bytes(8, "little") + text


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63  # bool is an int elsewhere, not here


def _entry(name: str, spec: object) -> Entry:
    """Check one tensor's entry: keys, dtype, shape, and shape against bytes."""
    what = f"Tensor {shown(name)}"
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} does not have exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{what} has the unknown dtype {shown(dtype)}.")
    if not isinstance(shape, list) or len(shape) > 32 or not all(map(_is_count, shape)):
        raise ValueError(f"{what} has the shape {shown(shape)}.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise ValueError(f"{what} has the offsets {shown(offsets)}.")
    start, end = offsets
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits != 8 * (end - start):
        raise ValueError(
            f"{what} of shape {shown(shape)} in {dtype} takes {-(-bits // 8):,} bytes; "
            f"its offsets {start}, {end} give {end - start:,}."
        )
    return Entry(dtype, tuple(shape), start, end)


def _check_offsets(entries: Mapping[str, Entry], payload_bytes: int) -> None:
    """Every byte of the payload belongs to exactly one tensor."""
    position = 0
    for name, entry in entries.items():
        if entry.start != position:
            what = "overlaps another" if entry.start < position else "leaves a hole before it"
            raise ValueError(
                f"Tensor {shown(name)} {what}: it starts at {entry.start:,}, not {position:,}."
            )
        position = entry.end
    if position != payload_bytes:
        raise ValueError(f"Its tensors take {position:,} bytes; the payload has {payload_bytes:,}.")
