"""Training speed and peak memory next to TRL + PEFT: same rows, same order, same adapter.

    python -m benchmarks.train --peers PEERS/bin/python --rows 160 --batch-size 8
    python -m benchmarks.train --peers PEERS/bin/python --quantize nf4 --data alpaca.jsonl

PEERS is a virtual environment with trl and peft (and the same torch). The two run in turn, each in
a process of its own; medians over --repeats. No speed is printed when the losses disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.orders import make_rows

LOSS_TOLERANCE = 0.05
"""Mean difference of the losses over the mean loss: bf16 in another order of operations."""
WORKERS = Path(__file__).parent / "workers"


def encode(model: str, data: str, num_rows: int, max_length: int) -> list[dict[str, list[int]]]:
    """Return token ids and labels of the first rows."""
    from peftkit.base import load_base
    from peftkit.data.load import DataConfig
    from peftkit.tasks.causal_lm import CausalLM

    base = load_base(model)
    config = DataConfig(train=data, packing=False, max_length=max_length)
    rows = CausalLM(base.model, base.tokenizer, config).load(data)[:num_rows]
    return [{"input_ids": list(row.input_ids), "labels": list(row.labels)} for row in rows]


def measure(python: str, worker: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one worker on a job and return what it measured."""
    file = folder / "job.json"
    file.write_text(json.dumps(job | {"output": str(folder / f"{worker}-out")}))
    command = [python, str(WORKERS / f"{worker}.py"), str(file)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{worker} failed:\n{result.stderr[-3000:]}")
    subprocess.run(["rm", "-rf", str(folder / f"{worker}-out")], check=True)
    return json.loads(result.stdout.strip().splitlines()[-1])


def disagreement(ours: list[float], theirs: list[float]) -> float:
    """Return the mean difference of two loss curves over their mean."""
    return mean(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / mean(theirs)


def main() -> int:
    """Run both in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peers", required=True, help="python of the environment with trl")
    parser.add_argument("--data", help="rows; by default the quickstart's orders")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--compile", action="store_true", help="let TRL compile its model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the measurements here")
    args = parser.parse_args()
    from peftkit.locate import locate

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = encode(args.model, args.data or str(make_rows(folder)), args.rows, args.max_length)
        job = {
            **{key: getattr(args, key) for key in ("model", "dtype", "quantize", "rank")},
            **{key: getattr(args, key) for key in ("batch_size", "learning_rate", "compile")},
            "source": locate(args.model).source,
            "rows": rows,
        }
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl_peft": []}
        for repeat in range(args.repeats):
            for worker, python in (("ours", sys.executable), ("trl_peft", args.peers)):
                runs[worker].append(measure(python, worker, job, folder))
                print(
                    f"run {repeat + 1} {worker}: {runs[worker][-1]['seconds']:.1f} s",
                    file=sys.stderr,
                )
    apart = disagreement(runs["ours"][0]["losses"], runs["trl_peft"][0]["losses"])
    if apart > LOSS_TOLERANCE:
        print(f"the losses differ by {apart:.1%}, more than {LOSS_TOLERANCE:.0%}: no speed is told")
        return 1
    report(args, rows, runs, apart)
    return 0


def report(
    args: argparse.Namespace,
    rows: list[dict[str, list[int]]],
    runs: dict[str, list[dict[str, Any]]],
    apart: float,
) -> None:
    """Print the table, and write it as JSON if asked."""
    tokens = sum(len(row["input_ids"]) for row in rows)
    print(f"{platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}")
    print(f"{len(rows)} rows, {tokens} tokens, batch {args.batch_size}, rank {args.rank}, ", end="")
    print(f"{args.dtype}, quantize {args.quantize}; losses differ by {apart:.2%}")
    print(f"{'':8} {'tokens/s':>9} {'(min-max)':>15} {'first step':>11} {'peak':>8}")
    summary = {}
    for worker, results in runs.items():
        speeds = sorted(tokens / result["seconds"] for result in results)
        peak = median(result["peak_bytes"] for result in results)
        first = median(result["first_step_seconds"] for result in results)
        summary[worker] = {"tokens_per_second": median(speeds), "peak_bytes": peak}
        spread = f"({speeds[0]:.0f}-{speeds[-1]:.0f})"
        print(f"{worker:8} {median(speeds):9.0f} {spread:>15} {first:9.1f} s {peak / 1e9:5.2f} GB")
    speed = summary["ours"]["tokens_per_second"] / summary["trl_peft"]["tokens_per_second"]
    memory = summary["ours"]["peak_bytes"] / summary["trl_peft"]["peak_bytes"]
    print(f"ours / trl: {speed:.2f} x the speed, {memory:.2f} x the peak memory")
    if args.json:
        args.json.write_text(json.dumps({"runs": runs, "speed": speed, "memory": memory}))


if __name__ == "__main__":
    raise SystemExit(main())
