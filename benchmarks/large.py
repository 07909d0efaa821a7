"""Loading a large base: main memory at its most and time, packed as it is loaded and as it was.

    python -m benchmarks.large --folder /tmp/large
    python -m benchmarks.large --folder /tmp/large --size 7b

A base of random weights is written tensor by tensor (1.1B: 2.2 GB, 7b: 13.5 GB); each way runs in a
process of its own. `whole`: all of it in 16 bits first, then packed in place.
`streamed`: weight by weight. `first start`, `second start`: with the cache of packed bases. Counted
is anonymous memory: pages of files, which the system takes back when it likes, are told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import shapes
from benchmarks.report import heading, table, versions
from peftkit.files.disk import write_tensor_stream
from peftkit.files.safetensors_header import DTYPE_NAMES, TensorSpec

SIZES: dict[str, dict[str, int]] = {
    "1.1b": {"hidden": 2048, "inner": 5632, "layers": 22, "heads": 32, "groups": 4},
    "7b": {"hidden": 4096, "inner": 11008, "layers": 32, "heads": 32, "groups": 32},
}
VOCAB = 32_000
WAYS = ("whole", "streamed", "first start", "second start")


def write_base(folder: Path, size: str) -> None:
    """Write a Llama of random weights in bf16, one tensor in memory at a time."""
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
    specs.sort(key=lambda spec: spec.order)
    write_tensor_stream(folder / "model.safetensors", specs, _drawn(specs), {"format": "pt"})
    config.save_pretrained(folder)
    shapes.tokenizer().save_pretrained(folder)


def _drawn(specs: list[TensorSpec]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for spec in specs:
        drawn = torch.empty(spec.shape, dtype=torch.bfloat16)
        yield drawn.normal_(0, 0.02, generator=generator) if len(spec.shape) > 1 else drawn.fill_(1)


class Watch:
    """The most anonymous memory, and pages of files, that this process has while it is watched."""

    def __init__(self) -> None:
        self.anonymous = self.mapped = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.005):
            lines = Path("/proc/self/status").read_text().splitlines()
            found = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
            self.anonymous = max(self.anonymous, _bytes(found["RssAnon"]))
            self.mapped = max(self.mapped, _bytes(found["RssFile"]))


def _bytes(text: str) -> int:
    return 1024 * int(text.split()[0])


def work(way: str, folder: str) -> dict[str, float]:
    """Load the base in this process, one way."""
    from peftkit.base.build import load_model
    from peftkit.base.load import load_base
    from peftkit.base.locate import Location
    from peftkit.base.purpose import CAUSAL_LM
    from peftkit.kernels import packing
    from peftkit.quant.quantize import quantize_model

    packing.COPY_SHARE = 0.0  # what is kept for speed is no part of loading
    began = time.perf_counter()
    with Watch() as watch:
        if way == "whole":
            model, _ = load_model(Location(folder, folder), None, CAUSAL_LM, torch.bfloat16)
            model.requires_grad_(False)
            quantize_model(model, "nf4")
        else:
            store = "off" if way == "streamed" else "auto"
            model = load_base(folder, dtype="bf16", quantize="nf4", store=store).model
        seconds = time.perf_counter() - began
    kept = sum(p.nbytes for p in model.parameters())
    return {
        "seconds": seconds,
        "anonymous": watch.anonymous,
        "mapped": watch.mapped,
        "kept": kept,
    }


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the base and the cache")
    parser.add_argument("--size", choices=SIZES, default="1.1b")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder = asked.folder / asked.size
    if asked.way:
        print(json.dumps(work(asked.way, str(folder))))
        return
    if not (folder / "config.json").exists():
        write_base(folder, asked.size)
    rows: list[tuple[str, ...]] = []
    for way in asked.ways.split(","):
        found = _in_a_process(asked, way)
        sizes = (f"{found[name] / 1e9:.2f}" for name in ("anonymous", "mapped", "kept"))
        rows.append((way, f"{found['seconds']:.1f}", *sizes))
        print(*rows[-1], flush=True)
    print(heading({"here": versions()}))
    columns = ("way", "seconds", "anonymous GB, at most", "files' pages GB", "packed base GB")
    print(table(columns, rows))


def _in_a_process(asked: argparse.Namespace, way: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large", "--folder", str(asked.folder)]
    environment = {**os.environ, "PEFTKIT_CACHE": str(asked.folder / "cache")}
    ran = subprocess.run(
        [*command, "--size", asked.size, "--way", way],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
