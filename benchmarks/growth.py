"""Growth of training cost with the length of a row, the rank and the number of layers.

    python -m benchmarks.growth
    python -m benchmarks.growth --against peft --json figures.json
    python -m benchmarks.growth --quick

SmolLM2, one row a step, all of its tokens targets. Each point runs in a separate process with a
time limit; a row that does not fit is reported, and longer ones are skipped.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.limits import Sizes, limits
from benchmarks.report import heading, table, versions, write_json
from benchmarks.train import PEERS
from benchmarks.workers import WorkerFailed, work

LENGTH, RANK, LAYERS = 512, 16, 30
"""Row length of points that vary another size."""
GRIDS = {
    "tokens": (256, 512, 1024, 2048, 4096, 8192),
    "rank": (1, 4, 16, 64, 256),
    "layers": (1, 2, 4, 8, 15, 30),
}
QUICK = {"tokens": (256, 512, 1024), "rank": (1, 16, 256), "layers": (1, 8, 30)}


def make_job(source: str, kind: str, value: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the job of one point."""
    sizes = {"tokens": LENGTH, "rank": RANK, "layers": LAYERS, kind: value}
    rng = random.Random(0)
    ids = [[rng.randint(100, 9000) for _ in range(sizes["tokens"])] for _ in range(args.steps)]
    return {
        "source": source,
        "num_layers": sizes["layers"],
        "rank": sizes["rank"],
        "rows": [{"input_ids": row, "labels": row} for row in ids],
        "task": "causal_lm",
        "dtype": args.dtype,
        "quantize": args.quantize,
        "device": args.device,
        "batch_size": 1,
        "learning_rate": 2e-4,
        "train": args.train,
    }


def measure(job: dict[str, Any], side: str, args: argparse.Namespace, folder: Path) -> Any:
    """Return a point's figures, or its error."""
    worker, changes = ("ours", {}) if side == "ours" else PEERS[side]
    python = sys.executable if side == "ours" else args.peers
    try:
        facts = work(worker, {**job, **changes}, folder, python=python, seconds=args.seconds)
    except WorkerFailed as error:
        return {"failed": str(error)[-300:]}
    if "failed" in facts:
        return facts
    step = median(facts["step_seconds"][1:])  # the first compiles and fills caches
    tokens = len(job["rows"][0]["input_ids"])
    sizes = Sizes.of(args.base, job["rank"], job["num_layers"])
    flop = sizes.step_flop([tokens], tokens, tokens)
    return {
        "step_seconds": step,
        "share": flop / step / getattr(args.limits, args.dtype),
        "tokens_per_second": tokens / step,
        "peak_bytes": facts["peak_bytes"],
    }


def cells(figures: Any) -> list[str]:
    """Return a point's cells of the table."""
    if figures is None:
        return ["-", "", "", ""]
    if "failed" in figures:
        lines = figures["failed"].splitlines()  # the end of a traceback, or a sentence
        told = next((line for line in lines if "Error: " in line), lines[0])
        return [told.rpartition("Error: ")[2], "", "", ""]
    return [
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['share']:.0%}",
        f"{1e3 * figures['step_seconds']:.0f} ms",
        f"{figures['peak_bytes'] / 1e9:.2f} GB",
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measure all points and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--against", default="", help="sides of benchmarks.train, as in peft")
    parser.add_argument("--peers", default=sys.executable, help="python with trl and peft")
    parser.add_argument("--steps", type=int, default=4, help="of each point; the first is left out")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a point")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--kinds", default=",".join(GRIDS))
    parser.add_argument(
        "--train", type=json.loads, default={}, help='of our train section: {"seed": 1}'
    )
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    args = parser.parse_args(words)
    from peftkit.base.load import load_base
    from peftkit.base.locate import locate

    source = locate(args.model).source
    args.base = load_base(args.model, device="cpu").model
    args.limits = limits("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    sides = ["ours", *filter(None, args.against.split(","))]
    lines, found = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds.split(","):
            over: set[str] = set()
            for value in (QUICK if args.quick else GRIDS)[kind]:
                job = make_job(source, kind, value, args)
                point: dict[str, Any] = {}
                for side in sides:
                    point[side] = None if side in over else measure(job, side, args, Path(folder))
                    if kind == "tokens" and point[side] and "failed" in point[side]:
                        over.add(side)
                found.append({"kind": kind, "value": value, **point})
                lines.append(
                    [f"{kind} {value}", *[cell for side in sides for cell in cells(point[side])]]
                )
                print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    print(heading({"ours": versions()}))
    print(
        f"{args.model}, {args.dtype}, quantize {args.quantize}; one row a step; where nothing else "
        f"is said, {LENGTH} tokens, rank {RANK}, {LAYERS} layers; medians of {args.steps - 1} "
        f"steps after the first; the machine's limit before them: {args.limits.show()}\n"
    )
    columns = [
        name for side in sides for name in (f"{side}: tokens/s", "of the limit", "step", "peak")
    ]
    print(table(["", *columns], lines))
    write_json(args.json, {"points": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
