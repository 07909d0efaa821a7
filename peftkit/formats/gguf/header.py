"""Reads a GGUF LoRA: its header, checked before any memory is allocated for tensors, and tensors.

Format: magic, u32 version, u64 tensor count, u64 key count; the keys; the tensors' infos; padding;
payload (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The reader of the gguf library
creates a Python object for every element that a file claims to have, which a hostile file can
abuse.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from peftkit.errors import AdapterError, first_few
from peftkit.files.strict_json import Json, JsonMap, shown
from peftkit.formats.guard import MAX_TENSORS, NAME, file_kind

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 32 << 20
MAX_KEYS = 10_000
MAX_STRINGS = 2_000_000
MAX_STRING_BYTES = 1 << 20
MAX_DIMS = 4

_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

KINDS = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 8: ("Q8_0", 32, 34), 30: ("BF16", 1, 2)}
"""ggml's types of adapters: name, numbers per block, bytes per block."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor: its shape in torch's order (ggml's is reversed) and the position of its bytes.

    Attributes:
        kind: ggml's type. start: Offset in the file.
    """

    kind: int
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A checked header; arrays among the keys are represented by their length."""

    keys: JsonMap
    tensors: Mapping[str, GGUFTensor]


def read_header(path: Path, file: BinaryIO) -> GGUFHeader:
    """Read and check the header of an open file.

    Raises:
        AdapterError: The file is not a GGUF adapter, is truncated, or has inconsistent sizes.
    """
    message = f"cannot read {path} as a GGUF adapter"
    size = os.fstat(file.fileno()).st_size
    cursor = _Cursor(message, file.read(MAX_HEADER_BYTES), cut=size > MAX_HEADER_BYTES)
    if cursor.data[:4] != MAGIC:
        kind = f"It is {file_kind(path)}."
        raise AdapterError(message, found=kind, fix="Use a LoRA in GGUF format.")
    cursor.at = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        big = version % (1 << 16) == 0
        kind = "It is in big-endian order." if big else f"It is GGUF version {version}."
        raise AdapterError(message, found=kind, fix="Write it again with a current llama.cpp.")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise AdapterError(
            message,
            found=f"It claims {num_tensors:,} tensors and {num_keys:,} keys; the limits are "
            f"{MAX_TENSORS:,} and {MAX_KEYS:,}.",
        )
    keys: Json = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in keys:
            raise AdapterError(message, found=f"The key {shown(key)} occurs twice.")
        keys[key] = cursor.value(cursor.number("I"))
        if key == "general.type" and keys[key] != "adapter":
            break  # a base model, whose other keys (its vocabulary) are not read
    if keys.get("general.type") != "adapter":
        kind = shown(keys.get("general.type", "not given"))
        fix = "Use the GGUF file of a LoRA; a base model belongs to --base."
        raise AdapterError(message, found=f"Its general.type is {kind}, not 'adapter'.", fix=fix)
    infos = [cursor.tensor_info() for _ in range(num_tensors)]
    alignment = keys.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise AdapterError(message, found=f"Its general.alignment is {shown(alignment)}.")
    payload = -(-cursor.at // alignment) * alignment
    return GGUFHeader(keys, _entries(message, infos, payload, size))


def read_values(path: Path, file: BinaryIO, entry: GGUFTensor) -> Tensor:
    """Return a tensor of a checked header, in float32.

    Raises:
        AdapterError: The file was truncated meanwhile.
    """
    import gguf

    data = torch.empty(entry.num_bytes, dtype=torch.uint8)
    file.seek(entry.start)
    if file.readinto(data.numpy().data) != entry.num_bytes:  # type: ignore[attr-defined]
        raise AdapterError(f"cannot read {path}", found="It became shorter while it was read.")
    rows = data.view(math.prod(entry.shape[:-1]), -1).numpy()
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(entry.kind))
    return torch.from_numpy(values).reshape(entry.shape)


_Info = tuple[str, tuple[int, ...], int, int]
"""A tensor's name, shape, type and offset in the header."""


def _entries(message: str, infos: list[_Info], payload: int, size: int) -> dict[str, GGUFTensor]:
    """Check each tensor's entry, and that all tensors fit into the file."""
    entries: dict[str, GGUFTensor] = {}
    problems = []
    for name, shape, kind, offset in infos:
        label, per_block, block_bytes = KINDS.get(kind, ("", 1, 0))
        num_bytes = math.prod(shape) // per_block * block_bytes
        problem = ""
        if not NAME.fullmatch(name) or name in entries:
            problem = "the name, or it occurs twice"
        elif not label:
            names = ", ".join(sorted(label for label, _, _ in KINDS.values()))
            problem = f"ggml's type {kind}; the supported types are {names}"
        elif 0 in shape or shape[-1] % per_block:
            problem = f"shape {shape}"
        elif payload + offset + num_bytes > size:
            problem = f"ends at byte {payload + offset + num_bytes:,} of {size:,}"
        if problem:
            problems.append(f"{shown(name)}: {problem}")
        entries[name] = GGUFTensor(kind, shape, payload + offset, num_bytes)
    if sum(entry.num_bytes for entry in entries.values()) > max(0, size - payload):
        problems.append("tensors that overlap")
    if problems or not entries:
        raise AdapterError(
            message,
            found=first_few(problems, 5) or "It holds no tensors.",
            fix="The file is damaged or truncated: download it again.",
        )
    return entries


class _Cursor:
    """Reads the header's values in order, never past its end."""

    def __init__(self, message: str, data: bytes, *, cut: bool) -> None:
        self.message, self.data, self.at = message, data, 0
        self._cut, self._strings = cut, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > len(self.data) - self.at:
            reason = f"Its header is larger than {MAX_HEADER_BYTES:,} bytes."
            raise AdapterError(
                self.message, found=reason if self._cut else "It ends within its header."
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        """Return the next number, `code` as in the struct module."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """Return the next string; invalid UTF-8 is escaped."""
        length = self.number("Q")
        self._strings += 1
        if length > MAX_STRING_BYTES or self._strings > MAX_STRINGS:
            raise AdapterError(
                self.message, found=f"A string of {length:,} bytes, or too many of them."
            )
        return self.take(length).decode("utf-8", "backslashreplace")

    def value(self, kind: int) -> Any:
        """Return the next value of a key, or the length of an array."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise AdapterError(self.message, found=f"A value of the unknown type {kind}.")
        element, count = self.number("I"), self.number("Q")
        if element == _STRING:
            for _ in range(count):
                self.string()
        elif element in _SCALARS:
            self.take(count * struct.calcsize("<" + _SCALARS[element]))
        else:
            raise AdapterError(self.message, found=f"An array of the unknown type {element}.")
        return count

    def tensor_info(self) -> _Info:
        """Return the next tensor's name, shape, type and offset."""
        name, num_dims = self.string(), self.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise AdapterError(
                self.message, found=f"The tensor {shown(name)} has {num_dims:,} dimensions."
            )
        shape = tuple(self.number("Q") for _ in range(num_dims))
        return name, shape[::-1], self.number("I"), self.number("Q")
