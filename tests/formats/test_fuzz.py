"""A damaged adapter folder loads equal or is a typed error; never anything else.

The seed and the number of mutations come from the environment, for longer runs:

    PEFTKIT_FUZZ_COUNT=10000 PEFTKIT_FUZZ_SEED=7 pytest tests/formats/test_fuzz.py

A failure prints the seed of the one mutation, which PEFTKIT_FUZZ_COUNT=1 runs again alone.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from peftkit.errors import PeftkitError
from peftkit.files import write_tensors
from peftkit.formats.guard import read_json, read_tensors

COUNT = int(os.environ.get("PEFTKIT_FUZZ_COUNT", "300"))
SEED = int(os.environ.get("PEFTKIT_FUZZ_SEED", "0"))
SLOWEST_SECONDS = 1.0
MOST_BYTES = 200 << 20

NUMBERS = (b"-1", b"0", b"1", b"1e400", b"NaN", b"2147483648", b"9223372036854775808", b"true")
WORDS = (b"null", b"[]", b"{}", b'""', b'"../../x"', b"[[[[", b"}", b",", b'"', b"\\", b"\0")


def flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: random.Random) -> None:
    start, length = rng.randrange(len(data)), rng.randrange(1, 9)
    data[start : start + length] = rng.randbytes(length)


def insert(data: bytearray, rng: random.Random) -> None:
    position = rng.randrange(len(data) + 1)
    data[position:position] = rng.randbytes(rng.randrange(1, 9))


def remove(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, 17)]


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def repeat(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start:start] = data[start : start + rng.randrange(1, 200)]


def set_length(data: bytearray, rng: random.Random) -> None:
    length = rng.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)])
    data[:8] = length.to_bytes(8, "little")


def change_number(data: bytearray, rng: random.Random) -> None:
    found = list(re.finditer(rb"-?\d+(?:\.\d+)?", bytes(data)))
    if found:
        match = rng.choice(found)
        data[match.start() : match.end()] = rng.choice(NUMBERS)


def change_word(data: bytearray, rng: random.Random) -> None:
    found = list(re.finditer(rb'"[^"]*"|null|true|false', bytes(data)))
    if found:
        match = rng.choice(found)
        data[match.start() : match.end()] = rng.choice(WORDS)


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bit,
    overwrite,
    insert,
    remove,
    truncate,
    repeat,
    set_length,
    change_number,
    change_word,
)


def mutated(data: bytes, rng: random.Random, limit: int | None = None) -> bytes:
    """Return the bytes after one to three mutations, within the first `limit` if given."""
    head, tail = bytearray(data[:limit]), data[len(data[:limit]) :]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if head:
            rng.choice(MUTATIONS)(head, rng)
    return bytes(head) + tail


def outcome(read: Callable[[], Any], what: str) -> Any:
    """Return what was read, or the typed error; in bounded time."""
    start = time.perf_counter()
    result: Any = None
    try:
        result = read()
    except PeftkitError as error:
        result = error
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    assert not isinstance(result, PeftkitError) or len(str(result)) < 4000, what
    assert time.perf_counter() - start < SLOWEST_SECONDS, what
    return result


def seeds() -> Iterator[tuple[int, random.Random]]:
    for index in range(COUNT):
        yield SEED + index, random.Random(SEED + index)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_mutated_tensor_file_is_finite_tensors_or_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    tensors = {f"layers.{i}.lora_{x}.weight": torch.randn(4, 9) for i in range(3) for x in "AB"}
    write_tensors(tensors, path, {"format": "pt"})
    whole, before = path.read_bytes(), peak_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    num_refused = 0
    for seed, rng in seeds():
        path.write_bytes(mutated(whole, rng, rng.choice((8, header, header, None))))
        result = outcome(lambda: read_tensors(path), f"seed {seed}")
        if isinstance(result, PeftkitError):
            num_refused += 1
            continue
        assert all(tensor.isfinite().all() for tensor in result.values()), f"seed {seed}"
        assert sum(t.numel() * t.element_size() for t in result.values()) <= len(whole)
    assert num_refused > COUNT // 2
    assert peak_bytes() - before < MOST_BYTES


def test_a_mutated_json_file_is_an_object_or_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16.5, "target_modules": ["q", "v"]}
    whole, before = json.dumps(fields, indent=2).encode(), peak_bytes()
    num_refused = 0
    for seed, rng in seeds():
        path.write_bytes(mutated(whole, rng))
        result = outcome(lambda: read_json(path), f"seed {seed}")
        num_refused += isinstance(result, PeftkitError)
        assert isinstance(result, dict | PeftkitError), f"seed {seed}"
    assert num_refused > COUNT // 4
    assert peak_bytes() - before < MOST_BYTES
