"""Safetensors files: headers are checked before tensors are allocated; writes are atomic.

Format: u64 little-endian header length, JSON header, payload
(https://github.com/huggingface/safetensors#format). Nothing is pickled or unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peftkit.errors import AdapterError, RunError, first_few
from peftkit.files.disk import ErrorType, open_regular, replacing
from peftkit.files.strict_json import shown

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_DIMS = 32

# Name in the file -> bits, torch dtype (None: can be copied as bytes only), in the order of the
# safetensors library, which sorts the tensors of a file by dtype (last first), then by name.
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
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
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
    """Entry of a tensor; `start` and `end` are byte offsets into the payload."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header; `tensors` has the order of the payload, which starts at byte `payload`."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    payload: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to write: its name, dtype (a key of DTYPES) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the payload, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8

    @property
    def order(self) -> tuple[int, str]:
        """Sort key of the safetensors library."""
        return -_DTYPE_ORDER[self.dtype], self.name


def read_header(
    path: Path,
    file: BinaryIO,
    *,
    max_bytes: int = MAX_HEADER_BYTES,
    error: ErrorType = AdapterError,
) -> Header:
    """Read and check the header of a file; raise `error` if it is invalid.

    The safetensors library checks keys, dtypes, shapes against sizes, and that every byte of the
    payload belongs to exactly one tensor. This function also checks the length of the header before
    parsing, duplicate names (the library keeps the last), and shapes that torch cannot represent.

    Args:
        file: `path`, open at its start.
    """
    message = f"cannot read {path} as safetensors"
    status = os.fstat(file.fileno())
    if status.st_size < 8:
        raise error(message, found=f"It has {status.st_size} bytes; a header length takes 8.")
    length = int.from_bytes(file.read(8), "little")
    if length > status.st_size - 8:
        raise error(
            message,
            found=f"Its header should have {length:,} bytes; the file has {status.st_size:,}.",
            fix="The file is truncated or not safetensors: download or save it again.",
        )
    if length > max_bytes:
        raise error(message, found=f"Its header has {length:,} bytes; the limit is {max_bytes:,}.")
    text = file.read(length)
    entries: dict[str, Entry] = {}
    metadata: Mapping[str, str] = {}
    problem, start = "", 0
    try:
        with safe_open(path, framework="numpy") as checked:
            metadata = checked.metadata() or {}
            for name in checked.offset_keys():
                tensor = checked.get_slice(name)
                dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                num_bits, _ = DTYPES.get(dtype, (0, None))
                if not num_bits:
                    problem = f"Tensor {shown(name)} has the unknown dtype {dtype}."
                elif len(shape) > MAX_DIMS or any(size >= 2**63 for size in shape):
                    problem = f"Tensor {shown(name)} has the shape {shown(shape)}."
                end = start + math.prod(shape) * num_bits // 8
                entries[name] = Entry(dtype, shape, start, end)
                start = end
        if not os.path.samestat(status, os.stat(path)):
            problem = "It was replaced while being read."
        elif text.count(b'"data_offsets"') != len(entries):
            problem = "It contains a tensor twice."
    except (SafetensorError, OSError) as refusal:  # the message may quote the name of a tensor
        problem = shown(str(refusal).removeprefix("Error while deserializing header: "), 300)[1:-1]
    if problem:
        raise error(message, found=problem, fix="The file is damaged: download or save it again.")
    return Header(entries, metadata, 8 + length)


class TensorFile:
    """An open safetensors file with a checked header; reads one tensor at a time, as a copy."""

    def __init__(self, path: Path, file: BinaryIO, header: Header, error: ErrorType) -> None:
        self.path, self.header = path, header
        self._file, self._error = file, error

    def raw(self, name: str) -> Tensor:
        """Return the bytes of a tensor: uint8 of shape (num_bytes,)."""
        entry = self.header.tensors[name]
        data = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        self._file.seek(self.header.payload + entry.start)
        # not mmap: if the file is truncated meanwhile, mmap raises SIGBUS instead of an error
        if self._file.readinto(data.numpy().data) != data.numel():  # type: ignore[attr-defined]
            raise self._error(f"cannot read {self.path}", found="It shrank while being read.")
        return data

    def tensor(self, name: str) -> Tensor:
        """Return a tensor with its stored dtype and shape."""
        entry = self.header.tensors[name]
        dtype = DTYPES[entry.dtype][1]
        if dtype is None:
            raise self._error(
                f"cannot use tensor {shown(name)} of {self.path}",
                found=f"Its dtype {entry.dtype} has no torch counterpart.",
            )
        return self.raw(name).view(dtype).reshape(entry.shape)


@contextlib.contextmanager
def open_tensors(
    path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES, error: ErrorType = AdapterError
) -> Iterator[TensorFile]:
    """Open a safetensors file and check its header; raise `error` if it is invalid."""
    with open_regular(path, error=error) as file:
        header = read_header(path, file, max_bytes=max_header_bytes, error=error)
        yield TensorFile(path, file, header, error)


def read_tensors(path: Path, *, error: ErrorType = AdapterError) -> dict[str, Tensor]:
    """Load all tensors of a safetensors file to the CPU; they do not share memory with the file.

    Raises:
        AdapterError: The file cannot be read or is invalid; `error` replaces this class.
    """
    with open_tensors(path, error=error) as file:
        return {name: file.tensor(name) for name in file.header.tensors}


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that contain NaN or Infinity."""
    return [name for name, tensor in tensors.items() if not is_finite(tensor)]


def is_finite(tensor: Tensor) -> bool:
    """Return whether every number is finite; needs little extra memory."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    small = tensor.element_size() == 1  # torch has no min of 8-bit floats
    for chunk in tensor.detach().reshape(-1).split(1 << 22):
        # aminmax propagates NaN, and is eight times as fast as isfinite().all()
        lowest, highest = torch.aminmax(chunk.float() if small else chunk)
        if not (lowest.isfinite() and highest.isfinite()):
            return False
    return True


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """Return the length and the header for contiguous tensors in the order of `specs`."""
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


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, byte-identical to the output of the safetensors library.

    Raises:
        RunError: There are no tensors, or some contain NaN or Infinity; or see `replacing`.
        OutputError: See `replacing`.
    """
    message = f"cannot save {path}"
    if not tensors:
        raise RunError(message, found="There are no tensors to save.")
    if bad := non_finite(tensors):
        raise RunError(
            message,
            found=f"{len(bad)} of {len(tensors)} tensors hold NaN or Infinity: "
            f"{first_few(bad, 3, ', ')}",
            fix="The run diverged: lower the learning rate, or go back to an earlier checkpoint.",
        )
    specs = specs_of(tensors)
    write_tensor_stream(path, specs, (tensors[spec.name] for spec in specs), metadata)


def specs_of(tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    """Return the specs of tensors, in the order of a file."""
    specs = [TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    return sorted(specs, key=lambda spec: spec.order)


def write_tensor_stream(
    path: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file from a stream of tensors in the order of `specs`.

    A tensor may also be given as its bytes (uint8). Non-finite values are not checked.
    """
    header = header_bytes(specs, metadata)
    with replacing(path, len(header) + sum(spec.num_bytes for spec in specs)) as file:
        file.write(header)
        for spec, tensor in zip(specs, tensors, strict=True):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            assert data.numel() == spec.num_bytes, spec
            file.write(data.numpy().data)
