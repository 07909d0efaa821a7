"""Training on a GPU: share of its peak, 4 and 16 bits, longest rows under a memory cap.

    python -m benchmarks.gpu --peers PEERS/bin/python --json figures.json
    python -m benchmarks.gpu --parts speed,longest --model llama-3.2-3b

Random weights of released shapes, made on the device, quantised block by block; random tokens, all
of them targets; LoRA on all linears. The parts: `speed` (bf16 and NF4 at --length, share of the
peak by 4N + 3a + 6P FLOP a token, against TRL + PEFT), `longest` (the longest row that trains under
each of --caps), `large` (70B in NF4 under 48 GB at 12k tokens), `small` (8B in NF4 under 8 GB at
8k). A cap is set by torch.cuda.set_per_process_memory_fraction; the CUDA context comes on top of
it.

Unsloth loads from folders only: compare it with `benchmarks.train --device cuda`.
Needs CUDA: without it this exits 2 and measures nothing.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Spread, disagreement, heading, table, versions, write_json
from benchmarks.shapes import LARGE, lora_flop
from benchmarks.train import LOSS_TOLERANCE, PEERS
from benchmarks.workers import WorkerFailed, work

PEAKS = {
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "RTX 5090": 209.5,
    "L4": 121,
    "A10": 125,
    "T4": 65,
    "V100": 125,
}
"""Dense bf16 rate in TFLOP/s with fp32 sums, by words of the name; the SXM kind where there are
several. T4 and V100 have fp16 only. NVIDIA publishes none of the RTX 3060, 4060 and 4070."""
PARTS = ("speed", "longest", "large", "small")


def peak_of(name: str) -> float | None:
    """Return the dense bf16 rate of a card in TFLOP/s by its name; None if it is not known."""
    # "L4" is no L40S, and an "RTX 4090 D" or "RTX 4090 Laptop GPU" is slower than an RTX 4090
    matches = (
        rate for part, rate in PEAKS.items() if re.search(rf"\b{part}\b(?! (D|Ti|Laptop)\b)", name)
    )
    return next(matches, None)


def share_of_peak(model: str, length: int, rank: int, speed: float, tflops: float) -> float:
    """Return the model FLOPs utilisation of so many tokens per second."""
    return speed * lora_flop(LARGE[model], length, rank) / (tflops * 1e12)


def longest(fits: Callable[[int], bool], low: int, high: int, step: int) -> int:
    """Return the longest row that fits, within `step` tokens; 0 if `low` does not fit.

    Doubles until a row does not fit, then bisects: each trial is a training run, so they are few.

    Args:
        fits: Tries a row of so many tokens.
        high: No longer row is tried.
    """
    if not fits(low):
        return 0
    best, over = low, high + step
    while best * 2 < over:
        if not fits(best * 2):
            over = best * 2
            break
        best *= 2
    while over - best > step:
        middle = (best + over) // 2 // step * step
        if middle <= best:
            break
        if fits(middle):
            best = middle
        else:
            over = middle
    return best


def make_job(model: str, length: int, steps: int, args: argparse.Namespace, **more: Any) -> Any:
    """Return the job of some steps with one row of random tokens each."""
    rng = random.Random(0)
    last = min(LARGE[model].settings["vocab_size"], 30_000) - 1
    ids = [[rng.randint(10, last) for _ in range(length)] for _ in range(steps * args.batch_size)]
    return {
        "shape": model,
        "sizes": args.sizes,
        "rank": args.rank,
        "rows": [{"input_ids": row, "labels": row} for row in ids],
        "task": "causal_lm",
        "dtype": "bf16",
        "quantize": "none",
        "device": args.device,
        "batch_size": args.batch_size,
        "learning_rate": 1e-4,
        **more,
    }


def trial(job: Mapping[str, Any], side: str, args: argparse.Namespace, folder: Path) -> Any:
    """Run one job; return its facts, or {"failed": why}."""
    worker, changes = ("ours", {}) if side == "ours" else PEERS[side]
    python = sys.executable if side == "ours" else args.peers
    try:
        facts = work(worker, {**job, **changes}, folder, python=python, seconds=args.seconds)
    except WorkerFailed as error:
        facts = {"failed": str(error)[-1500:]}
    told = facts.get("failed") or f"{median(facts['step_seconds'][1:]):.2f} s a step"
    length = len(job["rows"][0]["input_ids"])
    print(f"{side}, {job['quantize']}, {length:,} tokens: {told}", file=sys.stderr, flush=True)
    return facts


def speeds(args: argparse.Namespace, folder: Path) -> tuple[list[list[str]], list[Any]]:
    """Measure tokens per second, ours and peers' in turn, in 16 and in 4 bits."""
    lines, found = [], []
    for quantize in ("none", "nf4"):
        job = make_job(args.model, args.length, args.steps, args, quantize=quantize)
        runs: dict[str, list[Any]] = {
            side: [] for side in ("ours", *filter(None, args.against.split(",")))
        }
        for _ in range(args.repeats):
            for side, results in runs.items():
                if not any("failed" in result for result in results):
                    results.append(trial(job, side, args, folder))
        found.append({"quantize": quantize, "runs": runs})
        for side, results in runs.items():
            lines.append([f"{side}, {quantize}", *_speed(args, runs["ours"][0], results)])
    return lines, found


def _speed(args: argparse.Namespace, ours: Any, results: Sequence[Any]) -> list[str]:
    failed = next((result["failed"] for result in results if "failed" in result), "")
    if not failed and "failed" not in ours:
        apart = disagreement(ours["losses"], results[0]["losses"])
        failed = "" if apart <= LOSS_TOLERANCE else f"the losses differ by {apart:.1%}"
    if failed:
        return [failed.strip().splitlines()[-1][:60], "", "", ""]
    tokens = args.length * args.batch_size
    speed = Spread.of([tokens / median(result["step_seconds"][1:]) for result in results])
    share = share_of_peak(args.model, args.length, args.rank, speed.median, args.tflops)
    peak, reserved = (
        max(result.get(name, 0) for result in results) / 1e9
        for name in ("peak_bytes", "peak_reserved_bytes")
    )
    return [speed.show(), f"{share:.1%}", f"{peak:.1f} GB", f"{reserved:.1f} GB"]


def capped(
    model: str, cap: float, low: int, high: int, side: str, args: argparse.Namespace, folder: Path
) -> tuple[int, dict[str, Any]]:
    """Return the longest row that trains in NF4 under a cap, and the facts of that run."""
    facts: dict[int, Any] = {}

    def fits(length: int) -> bool:
        job = make_job(model, length, 2, args, quantize="nf4", cap_gb=cap)
        facts[length] = trial(job, side, args, folder)
        return "failed" not in facts[length]

    best = longest(fits, low, high, args.within)
    return best, facts.get(best, {})


def lengths(args: argparse.Namespace, folder: Path) -> tuple[list[list[str]], list[Any]]:
    """Measure the longest rows under each cap."""
    plans = []
    if "small" in args.parts:
        plans.append((args.model, 8.0, 8192, 8192, "ours"))
    if "longest" in args.parts:
        sides = ("ours", *filter(None, args.longest_against.split(",")))
        plans += [
            (args.model, float(cap), min(2048, args.most), args.most, side)
            for cap in args.caps
            for side in sides
        ]
    if "large" in args.parts:
        plans.append(("llama-3-70b", 48.0, 12288, 12288, "ours"))
    lines, found = [], []
    for model, cap, low, high, side in plans:
        best, facts = capped(model, cap, low, high, side, args, folder)
        found.append({"model": model, "cap_gb": cap, "side": side, "longest": best, "run": facts})
        step = median(facts["step_seconds"][1:]) if best else 0.0
        figures = [
            f"{best:,}" + ("" if low < high else f" (asked {low:,})"),
            f"{best / step:.0f}" if best else "-",
            f"{facts['peak_bytes'] / 1e9:.1f} GB" if best else "-",
            f"{facts.get('peak_reserved_bytes', 0) / 1e9:.1f} GB" if best else "-",
        ]
        lines.append([f"{side}, {model}, {cap:g} GB", *figures])
    return lines, found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), type=lambda text: text.split(","))
    parser.add_argument("--model", choices=tuple(LARGE), default="llama-3.1-8b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12, help="of a run; the first is left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", default="trl-liger,trl-recompute", help="of benchmarks.train")
    parser.add_argument("--longest-against", default="", help="likewise, for the longest rows")
    parser.add_argument("--peers", default=sys.executable, help="python with trl, peft, liger")
    parser.add_argument("--caps", type=float, nargs="*", default=[24.0], help="GB")
    parser.add_argument("--most", type=int, default=400_000, help="no longer row is tried")
    parser.add_argument("--within", type=int, default=4096, help="tokens of the longest row")
    parser.add_argument("--seconds", type=float, default=500, help="time limit of one run")
    parser.add_argument("--tflops", type=float, help="the chip's dense bf16 rate, if unknown here")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.set_defaults(sizes={}, device="cuda")
    args = parser.parse_args(words)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: known are {', '.join(PARTS)}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Measure the parts and print their tables."""
    args = arguments(words)
    import torch

    if not torch.cuda.is_available():
        print("This needs a CUDA GPU, and torch finds none here: nothing is measured.")
        return 2
    name = torch.cuda.get_device_name()
    args.tflops = args.tflops or peak_of(name)
    if args.tflops is None:
        print(f"Not known: the dense bf16 rate of {name}. Give it with --tflops.")
        return 2
    figures: dict[str, Any] = {}
    status = 0
    print(heading({"ours": versions()}))
    with tempfile.TemporaryDirectory() as folder:
        if "speed" in args.parts:
            lines, figures["speed"] = speeds(args, Path(folder))
            columns = ("", "tokens/s (least-most)", "of the peak", "allocated", "reserved")
            print(f"\n{args.model}, {args.length} tokens, r{args.rank}, {args.tflops:g} TFLOP/s\n")
            print(table(columns, lines))
            status |= any("failed" in r for f in figures["speed"] for r in f["runs"]["ours"])
        lines, figures["longest"] = lengths(args, Path(folder))
        if lines:
            print(f"\nNF4, r{args.rank}, one row; within {args.within} tokens\n")
            print(table(("", "longest row", "tokens/s", "allocated", "reserved"), lines))
            status |= any(not found["longest"] for found in figures["longest"])
    write_json(args.json, {"figures": figures})
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
