"""Many adapters trained in one pass, beside the same runs one after the other.

    python -m benchmarks.sweep --dtype fp32             # SmolLM2-135M: 1, 4, 8 and 16 members
    python -m benchmarks.sweep --members 4 --rows 2,8 --steps 10 --base FOLDER

Each cell is a process of its own: loading, steps and peak memory are told apart. The losses of both
ways are compared first; no speed is told where they differ by more than rounding. On a busy machine
seconds of the processor, loading included, mean more than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.orders import make_rows

TOLERANCE = {"fp32": 1e-3, "bf16": 0.05}
"""Of a step's loss: sums in another order, over the steps."""
RATES = (1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3)


def recipe_in(folder: Path, args: argparse.Namespace) -> Path:
    """Write data and a recipe of one member."""
    data = make_rows(folder, number=args.rows * args.steps)
    recipe = {
        "base": {"model": args.base, "dtype": args.dtype, "quantize": args.quantize},
        "method": {"type": "lora", "rank": 16, "alpha": 32},
        "data": {"train": str(data), "max_length": 256, "packing": False},
        "train": {"max_steps": args.steps, "batch_size": args.rows, "compile": False},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return file


def work(args: argparse.Namespace) -> None:
    """Train the members one way, and print what it took."""
    from peftkit.recipe import run
    from peftkit.run.config import load
    from peftkit.sweeps.members import grid
    from peftkit.sweeps.sweep import sweep

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        recipe = recipe_in(folder, args)
        rates = [RATES[n % len(RATES)] * (1 + n // len(RATES)) for n in range(args.count)]
        began = time.perf_counter()
        if args.way == "together":
            over = [f"train.learning_rate={','.join(f'{rate:.6f}' for rate in rates)}"]
            members = grid(recipe, over, out=folder / "out")
            outcomes = sweep(members, folder / "out")
            folders = [folder / "out" / member.name for member in members]
            steps = sum(outcome.seconds for outcome in outcomes)
        else:
            folders, steps = [], 0.0
            for n, rate in enumerate(rates):
                out = folder / f"run{n}"
                result = run(
                    load(recipe, [f"train.learning_rate={rate:.6f}", f"train.output_dir={out}"])
                )
                steps += result.metrics["num_tokens"] / result.metrics["tokens_per_second"]
                folders.append(out)
        found: dict[str, Any] = {
            "whole": time.perf_counter() - began,
            "cpu": time.process_time(),
            "steps": steps,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "losses": [losses(each) for each in folders],
        }
    print(json.dumps(found))


def losses(folder: Path) -> list[float]:
    """Return the losses of a run's steps."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "learning_rate" in entry]


def measured(args: argparse.Namespace, way: str, count: int, rows: int) -> dict[str, Any]:
    """Run a worker and return what it found."""
    command = [sys.executable, "-m", "benchmarks.sweep", "--way", way, "--count", str(count)]
    command += ["--rows", str(rows), "--steps", str(args.steps), "--base", args.base]
    command += ["--dtype", args.dtype, "--quantize", args.quantize]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", default="4,8,16")
    parser.add_argument("--rows", default="2,8", help="rows of a member's step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--way", choices=["together", "alone"], help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.way:
        args.rows = int(args.rows)
        work(args)
        return 0
    failed = False
    print("| members | rows | steps: alone, together | ratio | whole | processor | GB | of one |")
    print("|---|---|---|---|---|---|---|---|")
    for rows in map(int, args.rows.split(",")):
        one = measured(args, "alone", 1, rows)
        print(f"| 1 | {rows} | {one['steps']:.1f} s | | | | {one['peak'] / 1e9:.2f} | 1 |")
        for count in map(int, args.members.split(",")):
            alone = measured(args, "alone", count, rows)
            together = measured(args, "together", count, rows)
            worst = max(
                abs(a - b)
                for mine, theirs in zip(together["losses"], alone["losses"], strict=True)
                for a, b in zip(mine, theirs, strict=True)
            )
            if worst > TOLERANCE[args.dtype]:
                print(f"{count} members of {rows} rows: losses differ by {worst:.2g}")
                failed = True
                continue
            print(
                f"| {count} | {rows} | {alone['steps']:.1f} s, {together['steps']:.1f} s "
                f"| {alone['steps'] / together['steps']:.2f} "
                f"| {alone['whole'] / together['whole']:.2f} "
                f"| {alone['cpu'] / together['cpu']:.2f} | {together['peak'] / 1e9:.2f} "
                f"| {together['peak'] / one['peak']:.2f} |",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
