"""One long row on 1, 2 and 4 processes (train.context_parallel): loss, memory and time of a step.

    python -m benchmarks.context

A Llama with random weights in fp32 over gloo, one row a step. Exits 1 where a loss differs from
that of one process by more than 1e-5 of it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.families import make_rows
from benchmarks.report import heading, table
from benchmarks.workers import work

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
PROCESSES, TOLERANCE = (1, 2, 4), 1e-5


def make_job(tokens: int, steps: int) -> dict[str, Any]:
    """Return what all runs are told."""
    return {
        "shape": "smollm2-135m",
        "sizes": SIZES,
        "task": "causal_lm",
        "rows": make_rows("causal_lm", steps, shortest=tokens, longest=tokens),
        "dtype": "fp32",
        "quantize": "none",
        "rank": 8,
        "device": "cpu",
        "batch_size": 1,
        "learning_rate": 1e-3,
    }


def main() -> int:
    """Measure each length, activations kept and recomputed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    job, lines, worst, versions = make_job(args.tokens, args.steps), [], 0.0, {}
    for recomputed in (False, True):
        alone: list[float] = []
        for processes in PROCESSES:
            settings = {"gradient_checkpointing": recomputed, "compile": False}
            settings |= {"context_parallel": processes, "tokens_per_batch": None, "memory": 100.0}
            with tempfile.TemporaryDirectory() as folder:
                told = {**job, "train": settings}
                found = work("ours", told, Path(folder), processes=processes)
            losses, versions = found["losses"], found["versions"]
            alone = alone or losses
            differs = max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))
            worst = max(worst, differs)
            lines.append(
                [
                    f"{processes}, {'recomputed' if recomputed else 'kept'}",
                    f"{losses[-1]:.6f}",
                    f"{differs:.1e}",
                    f"{found['peak_bytes'] / 1e6:,.0f}",
                    f"{median(found['step_seconds'][1:]):.1f}",
                ]
            )
            print(*lines[-1], flush=True)
    print(table(["processes, activations", "last loss", "differs", "peak MB", "s a step"], lines))
    print(heading({"peftkit": versions}))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
