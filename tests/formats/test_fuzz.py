"""A damaged adapter folder loads equal or is a typed error; never anything else.

The seed and the number of mutations come from the environment, for longer runs:

    PEFTKIT_FUZZ_COUNT=10000 PEFTKIT_FUZZ_SEED=7 pytest tests/formats/test_fuzz.py

A failure prints the seed of the one mutation, which PEFTKIT_FUZZ_COUNT=1 runs again alone.
"""

import json
import os
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from peftkit.adapter import Adapter, attach
from peftkit.errors import PeftkitError
from peftkit.files.tensors import write_tensors
from peftkit.formats.folders import NOTES, TENSORS
from peftkit.formats.guard import read_json, read_tensors
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.base import AdapterModule
from peftkit.methods.lora import LoRA

COUNT = int(os.environ.get("PEFTKIT_FUZZ_COUNT", "40"))
SEED = int(os.environ.get("PEFTKIT_FUZZ_SEED", "0"))
SLOWEST_SECONDS = 4.0
MOST_BYTES = 200 << 20

NUMBERS = (b"-1", b"0", b"1", b"1e400", b"NaN", b"2147483648", b"9223372036854775808", b"true")
WORDS = (b"null", b"[]", b"{}", b'""', b'"../../x"', b"[[[[", b"}", b",", b'"', b"\\", b"\0")


def flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: random.Random) -> None:
    start, length = rng.randrange(len(data)), rng.randrange(1, 9)
    data[start : start + length] = rng.randbytes(length)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def set_length(data: bytearray, rng: random.Random) -> None:
    length = rng.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)])
    data[:8] = length.to_bytes(8, "little")


def change_number(data: bytearray, rng: random.Random) -> None:
    matches = list(re.finditer(rb"-?\d+(?:\.\d+)?", bytes(data)))
    if matches:
        match = rng.choice(matches)
        data[match.start() : match.end()] = rng.choice(NUMBERS)


def change_word(data: bytearray, rng: random.Random) -> None:
    matches = list(re.finditer(rb'"[^"]*"|null|true|false', bytes(data)))
    if matches:
        match = rng.choice(matches)
        data[match.start() : match.end()] = rng.choice(WORDS)


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 0.5, 10**9, 2**63, -(2**63), 1e300, 1e-300, "", "x", "8", "("),
    *(r"(\w+\.?)+!", r".*", "../../../etc/passwd", "\x1b[2J", "all-linear", "os.system"),
    *([], {}, [[]], [None], [1], ["q_proj"], [{"q_proj": 1}], {"": 1}, {"q_proj": None}),
    *(
        {"q_proj": 0},
        {"q_proj": -1},
        {"q_proj": "8"},
        {"(": 4},
        {r"(\w+\.?)+!": 4},
        {"a": {"b": []}},
    ),
    *(["x" * 10_000], ["q_proj"] * 10_000, {"q_proj": 10**9}, {"type": "dora"}),
)
MORE_FIELDS = (
    *("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "modules_to_save", "lora_bias"),
    *("layers_to_transform", "layers_pattern", "exclude_modules", "auto_mapping", "megatron_core"),
    *("megatron_config", "tokenizer_kwargs", "trainable_token_indices", "target_parameters"),
)


def change_field(fields: dict[str, Any], rng: random.Random) -> None:
    """Set one field, at the top or inside one, to a valid JSON value that it should not have."""
    while True:
        key = rng.choice([*fields, *MORE_FIELDS])
        inner = fields.get(key)
        if not isinstance(inner, dict) or not inner or rng.random() < 0.5:
            break
        fields = inner
    if rng.random() < 0.1:
        fields.pop(key, None)
    else:
        fields[key] = rng.choice(ODD_VALUES)


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bit,
    overwrite,
    truncate,
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


def test_a_mutated_tensor_file_is_finite_tensors_or_a_typed_error(tmp_path):
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


def test_a_mutated_json_file_is_an_object_or_a_typed_error(tmp_path):
    path = tmp_path / "adapter_config.json"
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16.5, "target_modules": ["q", "v"]}
    whole = json.dumps(fields, indent=2).encode()
    for seed, rng in seeds():
        path.write_bytes(mutated(whole, rng))
        result = outcome(lambda: read_json(path), f"seed {seed}")
        assert isinstance(result, dict | PeftkitError), f"seed {seed}"


@pytest.mark.parametrize("made_here", [True, False], ids=["with our notes", "PEFT's files alone"])
def test_mutated_folders_fail_typed(llama, tmp_path, made_here):
    adapter = attach(llama, LoRA(rank=2, alpha=4, targets=("q", "down"), rank_pattern={"q": 3}))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.uniform_(-1, 1)
    save_adapter(adapter, tmp_path, Provenance(base="tiny", fingerprint="sha256:" + "1" * 64))
    if not made_here:
        (tmp_path / NOTES).unlink()
    expected, scalings = adapter.state(), scalings_of(adapter)
    adapter.detach()
    whole = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    before, outcomes = peak_bytes(), Counter[str]()
    for seed, rng in seeds():
        path = rng.choice(list(whole))
        is_tensors = path.name == TENSORS
        header = 8 + int.from_bytes(whole[path][:8], "little") if is_tensors else None
        if is_tensors or rng.random() < 0.5:
            path.write_bytes(mutated(whole[path], rng, header if rng.random() < 0.8 else None))
        else:
            fields = json.loads(whole[path])
            change_field(fields, rng)
            path.write_text(json.dumps(fields))
        result = outcome(lambda: load_adapter(llama, tmp_path), f"seed {seed}, {path.name}")
        assert path.write_bytes(whole[path])
        if isinstance(result, PeftkitError):
            outcomes["refused"] += 1
        else:
            outcomes["loaded"] += 1
            loaded, now = result.state(), scalings_of(result)
            result.detach()
            if made_here:  # there is nothing that a file of PEFT could be checked by
                assert now == scalings, f"seed {seed}, {path.name}"
                assert loaded.keys() == expected.keys()
                assert all(torch.equal(t, loaded[n]) for n, t in expected.items()), f"seed {seed}"
        assert not any(isinstance(module, AdapterModule) for module in llama.modules())
    assert outcomes["refused"] > COUNT // 2
    assert outcomes["loaded"] > 0
    assert peak_bytes() - before < MOST_BYTES


def scalings_of(adapter: Adapter) -> dict[str, float]:
    return {path: float(module.scaling) for path, module in adapter.modules.items()}  # type: ignore[arg-type]
