"""A large base on a small machine: memory and time of loading it, and of a QLoRA step on it.

    python -m benchmarks.large
    python -m benchmarks.large --size 7b --folder DIR

A Llama of random weights in bf16 is written to the disk, one tensor in memory at a time (1.1b: 2.2
GB, 7b: 13.5 GB); each measurement runs in a separate process. Loading: `whole`, in 16 bits, then
packed to nf4 in place; `streamed`, weight by weight; `first start` and `second start`, with the
cache of packed bases, which the first one fills. A step of one row of 512 tokens, recomputed, LoRA
of rank 16: on a base in main memory, on the cache's mapped file, and streamed from it
(base.placement: stream).

A process needs its anonymous memory; the system can reclaim pages of files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import shapes
from benchmarks.report import heading, table, versions
from benchmarks.workers.large import LOADING, STEPS, work
from peftkit.files.disk import check_space, write_json
from peftkit.files.tensors import DTYPE_NAMES, TensorSpec, write_tensor_stream
from peftkit.kernels.device import free_bytes

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "inner": 128, "layers": 3, "heads": 4, "groups": 2},
    "1.1b": {"hidden": 2048, "inner": 5632, "layers": 22, "heads": 32, "groups": 4},
    "7b": {"hidden": 4096, "inner": 11008, "layers": 32, "heads": 32, "groups": 32},
}
VOCAB = 32_000
SHARD = 2_000_000_000
"""Approximate bytes per file."""
FIGURES = ("anonymous", "store", "kept")


def write_base(folder: Path, size: str) -> None:
    """Write a Llama of random weights in bf16, shard by shard, one tensor in memory at a time."""
    sizes = SIZES[size]
    config = transformers.LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["groups"],
        vocab_size=VOCAB,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    name = DTYPE_NAMES[torch.bfloat16]
    specs = [TensorSpec(n, name, tuple(p.shape)) for n, p in model.named_parameters()]
    total = sum(spec.num_bytes for spec in specs)
    check_space(folder, int(1.4 * total))  # with the packed base
    shards = list(_shards(specs))
    generator, places = torch.Generator().manual_seed(0), {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensor_stream(folder / file, shard, _drawn(shard, generator), {"format": "pt"})
        places |= {spec.name: file for spec in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(index, folder / "model.safetensors.index.json")
    shapes.tokenizer().save_pretrained(folder)
    config.save_pretrained(folder)


def _shards(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    for spec in specs:
        if sum(s.num_bytes for s in shard) >= SHARD:
            yield sorted(shard, key=lambda s: s.order)
            shard = []
        shard.append(spec)
    yield sorted(shard, key=lambda s: s.order)


def _drawn(specs: list[TensorSpec], generator: torch.Generator) -> Iterator[torch.Tensor]:
    for spec in specs:
        drawn = torch.empty(spec.shape, dtype=torch.bfloat16)
        yield drawn.normal_(0, 0.02, generator=generator) if len(spec.shape) > 1 else drawn.fill_(1)


def main() -> None:
    """Print a row for each measurement."""
    ways = (*LOADING, *STEPS)
    parser = argparse.ArgumentParser(description=__doc__)
    told = Path(tempfile.gettempdir()) / "peftkit-large"
    parser.add_argument("--folder", type=Path, default=told, help="for the base and the cache")
    parser.add_argument("--size", choices=SIZES, default="1.1b")
    parser.add_argument("--ways", default=";".join(ways), help="some of them, by semicolons")
    parser.add_argument("--tokens", type=int, default=512, help="of the step's row")
    parser.add_argument("--keep", action="store_true", help="leave the folder for another time")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder: Path = asked.folder / asked.size
    if asked.way:
        print(json.dumps(work(asked.way, folder, asked.tokens)))
        return
    try:
        if not (folder / "config.json").exists():
            print(f"Writing a base of {asked.size} into {folder}", flush=True)
            write_base(folder, asked.size)
        rows = [_row(asked, way, folder) for way in asked.ways.split(";")]
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(_cache(asked), ignore_errors=True)
    print(heading({"here": versions()}))
    print(f"Steps are of one row of {asked.tokens} tokens.")
    columns = ("way", "seconds", "anonymous GB, at most", "pages of the store GB", "base GB")
    print(table(columns, rows))


def _row(asked: argparse.Namespace, way: str, folder: Path) -> tuple[str, ...]:
    size, free = sum(p.stat().st_size for p in folder.glob("*.safetensors")), free_bytes()
    if way == "whole" and free is not None and 1.3 * size > free:
        found = f"needs {1.3 * size / 1e9:.0f} GB, {free / 1e9:.0f} are free"
        row: tuple[str, ...] = (way, found, *("" for _ in FIGURES))
    else:
        told = _in_a_process(asked, way)
        row = (way, f"{told['seconds']:.1f}", *(f"{told[name] / 1e9:.2f}" for name in FIGURES))
    print(*row, flush=True)
    return row


def _cache(asked: argparse.Namespace) -> Path:
    found: Path = asked.folder / f"cache-{asked.size}"
    return found


def _in_a_process(asked: argparse.Namespace, way: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large", "--folder", str(asked.folder)]
    environment = {**os.environ, "PEFTKIT_CACHE": str(_cache(asked))}
    ran = subprocess.run(
        [*command, "--size", asked.size, "--way", way, "--tokens", str(asked.tokens)],
        env=environment, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
