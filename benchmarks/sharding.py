"""Compare a sharded base with TRL + PEFT + accelerate's FSDP2: losses, memory, time.

    python -m benchmarks.sharding --peers PEERS/bin/python

A Llama with random weights in fp32 over gloo: two processes with two rows each, compared with one
process with four rows; all sides start from the same adapter and use the same rows. accelerate
ignores its FSDP settings on machines without a GPU: `fsdp2` disables this check
(`benchmarks/workers/trl.py`), `as told` does not. In TRL, nf4 is packed by bitsandbytes, and
accelerate shards its bytes if they are stored as floats (bnb_4bit_quant_storage); TRL trains the
adapter of such a base in bf16. Exits 1 if peftkit's losses on two processes differ from the losses
on one by more than 1e-5.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import shapes
from benchmarks.families import make_rows
from benchmarks.report import heading, table
from benchmarks.workers import WorkerFailed, work
from peftkit.adapter import attach
from peftkit.formats.peft.folder import save_adapter
from peftkit.methods.lora import LoRA

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
TOLERANCE = 1e-5
FSDP2 = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
"""Variables that `accelerate launch` sets for distributed_type: FSDP, fsdp_version: 2."""


def make_job(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the model and the initial adapter of both sides; return their common settings."""
    shape = shapes.SHAPES["smollm2-135m"]
    model = shapes.build(shape, **SIZES)
    model.save_pretrained(folder / "model")
    shapes.tokenizer().save_pretrained(folder / "model")
    save_adapter(attach(model, LoRA(rank=8, alpha=16)), folder / "start")
    return {
        "source": str(folder / "model"),
        "adapter": str(folder / "start"),
        "task": "causal_lm",
        "rows": make_rows("causal_lm", 4 * args.steps, shortest=32, longest=96),
        "dtype": "fp32",
        "rank": 8,
        "device": "cpu",
        "batch_size": 2,
        "learning_rate": 1e-3,
    }


def reason(error: Exception) -> str:
    """Return the first error in a worker's traceback."""
    lines = [line.split("]: ", 1)[-1] for line in str(error).splitlines()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines[-1:])[0][:100]


def runs(args: argparse.Namespace, quantize: str) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Return worker, number of processes and specific settings of each side."""
    alone = {"quantize": quantize, "batch_size": 4}
    two = {"quantize": quantize}
    shared = two | {"shard_on_cpu": True, "environ": FSDP2}
    found = {
        "peftkit, 1 process": ("ours", 1, alone),
        "peftkit, 2, shard: none": ("ours", 2, two),
        "peftkit, 2, shard: base": ("ours", 2, two | {"train": {"shard": "base"}}),
        "TRL + PEFT, 1 process": ("trl", 1, alone),
        "TRL + PEFT, 2, as told": ("trl", 2, two | {"environ": FSDP2}),
        "TRL + PEFT, 2, fsdp2": ("trl", 2, shared),
    }
    if quantize == "nf4":
        found["TRL + PEFT, 2, fsdp2, floats"] = ("trl", 2, shared | {"storage": "float32"})
    return {name: run for name, run in found.items() if run[0] == "ours" or args.peers}


def measure(
    args: argparse.Namespace, quantize: str, folder: Path
) -> tuple[float, str, dict[str, Any]]:
    """Return the difference of peftkit's losses on one and two processes, and a table of all sides.

    The third value has the versions of each side's packages.
    """
    job, lines, versions = make_job(args, folder), [], {}
    alone: dict[str, list[float]] = {}
    worst = 0.0
    for name, (worker, processes, more) in runs(args, quantize).items():
        python = sys.executable if worker == "ours" else args.peers
        try:
            found = work(worker, {**job, **more}, folder, python=python, processes=processes)
        except WorkerFailed as error:
            lines.append([name, f"fails: {reason(error)}", *[""] * 5])
            print(error, file=sys.stderr)
            continue
        versions[worker] = found["versions"]
        losses = found["losses"]
        before = alone.setdefault(worker, losses)
        differs = max(abs(a - b) for a, b in zip(losses, before, strict=True))
        worst = max(worst, differs) if worker == "ours" else worst
        lines.append(
            [
                name,
                f"{losses[-1]:.6f}",
                f"{differs:.1e}",
                *(f"{found[size] / 1e6:,.1f}" for size in ("base_bytes", "trained_bytes")),
                f"{found['own_bytes'] / 1e6:,.0f}",
                f"{median(found['step_seconds'][1:]):.2f}",
            ]
        )
    kind = "fp32" if quantize == "none" else quantize
    columns = [kind, "last loss", "from one process", "base MB", "adapter MB", "own MB", "s a step"]
    return worst, table(columns, lines), versions


def main() -> int:
    """Measure both precisions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="python of an environment with trl, peft, bitsandbytes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quantize", type=lambda text: text.split(","), default=("none", "nf4"))
    args = parser.parse_args()
    worst, tables, versions = 0.0, [], {}
    for quantize in args.quantize:
        with tempfile.TemporaryDirectory() as folder:
            differs, made, versions = measure(args, quantize, Path(folder))
        tables.append(made)
        worst = max(worst, differs)
    print(heading(versions), *tables, sep="\n\n")
    print(f"peftkit: largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
