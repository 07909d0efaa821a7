"""Fast reading of the keys of a GGUF file, and a cache of its converted tokenizer.

The reader of the package gguf creates several numpy objects for each element of an array. For a
vocabulary of 262,144 tokens with scores and types, that takes most of the time of opening a base.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import gguf
import numpy
import tokenizers
import transformers
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from peftkit.errors import BaseError, PeftkitError
from peftkit.files.disk import cache_folder, replacing

MIN_CACHED_TOKENS = 1 << 16
"""Size of a vocabulary whose converted tokenizer is cached."""


class ArrayReader(gguf.GGUFReader):
    """The reader of the package gguf, with strings of arrays as memory views."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        prefix = [self._get(orig_offs, numpy.uint32), self._get(orig_offs + 4, numpy.uint64)]
        kind, count = gguf.GGUFValueType(int(prefix[0][0])), int(prefix[1][0])
        start = orig_offs + 12
        dtype = self.gguf_scalar_to_np.get(kind)
        if kind == gguf.GGUFValueType.STRING:
            parts, end = self._strings(start, count)
        elif dtype is not None:
            end = start + count * numpy.dtype(dtype).itemsize
            if end > len(self.data):
                raise ValueError(f"an array of {count:,} values ends after the file")
            values = self._get(start, dtype, count).view(numpy.ndarray)
            parts = list(values.reshape(-1, 1))
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [gguf.GGUFValueType.ARRAY, kind] if count else [gguf.GGUFValueType.ARRAY]
        return end - orig_offs, [*prefix, *parts], list(range(2, 2 + count)), types

    def _strings(self, at: int, count: int) -> tuple[list[memoryview], int]:
        """Return `count` strings from an offset, and the offset of their end."""
        is_little = (sys.byteorder == "little") == (self.byte_order == "I")
        length_at = struct.Struct("<Q" if is_little else ">Q").unpack_from
        data, strings = self.data.data, []
        for _ in range(count):
            (length,) = length_at(data, at)
            at += 8 + length
            if at > len(data):
                raise ValueError(f"a string of {length:,} bytes ends after the file")
            strings.append(data[at - length : at])
        return strings, at


@contextmanager
def fast_reading() -> Iterator[Callable[[object], ArrayReader]]:
    """Let transformers read each GGUF file once within the context, by `ArrayReader`.

    The context also caches the map of names, the parsed keys and, across processes, the converted
    tokenizer (`_convert_or_open`). Yield the function that opens a file.
    """
    parsed: dict[str, ArrayReader] = {}
    checkpoints: dict[str, Any] = {}

    def open_reader(path: Any, *more: Any) -> ArrayReader:
        if str(path) not in parsed:
            try:
                parsed[str(path)] = ArrayReader(path, *more)
            except Exception as error:  # from numpy, if the header does not fit the file's size
                raise BaseError(
                    f"{path} is not a complete GGUF file.",
                    found=str(error),
                    fix="Download it again and compare its size with the one on its page.",
                ) from error
        return parsed[str(path)]

    def load_checkpoint(path: object, *args: object, **options: object) -> Any:
        if args or options.get("return_tensors"):
            return plain["load_gguf_checkpoint"](path, *args, **options)
        if str(path) not in checkpoints:
            checkpoints[str(path)] = plain["load_gguf_checkpoint"](path)
        keys = checkpoints[str(path)]
        return {**keys, "config": copy.deepcopy(keys["config"])}  # callers change it

    def convert(architecture: str, keys: dict[str, object]) -> tuple[tokenizers.Tokenizer, object]:
        reader = next(iter(parsed.values()))
        return _convert_or_open(plain["convert_gguf_tokenizer"], reader, architecture, keys)

    patches: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", open_reader),
        (gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),
        (transformers_gguf, "_gguf_parse_value", None),
        (transformers_gguf, "load_gguf_checkpoint", load_checkpoint),
    ]
    with suppress(ImportError):  # before 5.2
        own = importlib.import_module("transformers.integrations.gguf")
        patches.append((own, "convert_gguf_tokenizer", convert))
        own = importlib.import_module("transformers.integrations.gguf.reader")
        # slices of numpy.memmap take five times as long
        patches.append((own, "_mapped", lambda path: open_reader(path).data.view(numpy.ndarray)))
    patches = [entry for entry in patches if hasattr(entry[0], entry[1])]
    plain = {name: getattr(module, name) for module, name, _ in patches}
    for module, name, value in patches:
        setattr(module, name, value or partial(_value_of, plain[name]))
    try:
        yield open_reader
    finally:
        for module, name, _ in patches:
            setattr(module, name, plain[name])


def _value_of(parse: Callable[..., Any], part: Any, types: Any) -> Any:
    """Return the value of a part of a field, as `parse`, transformers' `_gguf_parse_value`."""
    if isinstance(part, memoryview):
        return str(part, "utf-8")
    return part.item() if isinstance(types, list) and len(types) > 1 else parse(part, types)


def _convert_or_open(
    convert: Callable[..., Any], reader: ArrayReader, architecture: str, keys: dict[str, Any]
) -> Any:
    """Return transformers' conversion of a tokenizer, from peftkit's cache if it has it.

    Only vocabularies without merges are cached, since transformers derives the merges from all
    pairs of tokens. The cache's key is the digest of the file's header, which holds the whole
    tokenizer, and of the versions of the libraries.
    """
    if "merges" in keys or len(keys["tokens"]) < MIN_CACHED_TOKENS:
        return convert(architecture, keys)
    digest = hashlib.sha256(reader.data[: reader.data_offset].tobytes())
    digest.update(f"{transformers.__version__} {tokenizers.__version__}".encode())
    path = cache_folder() / "tokenizers" / f"{digest.hexdigest()[:32]}.json"
    with suppress(Exception):  # tokenizers raises it for a missing or damaged file
        return tokenizers.Tokenizer.from_file(str(path)), {}
    tokenizer, options = convert(architecture, keys)
    if not options:
        text = tokenizer.to_str().encode()
        with suppress(OSError, PeftkitError):  # the cache is optional
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, len(text)) as file:
                file.write(text)
    return tokenizer, options
