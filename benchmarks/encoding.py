"""Speed and memory of encoding 10,000, 100,000 and more rows.

    python -m benchmarks.encoding                                  # 10,000 and 100,000 rows
    python -m benchmarks.encoding --rows 100000 --against map trl --peers PEERS/bin/python
    python -m benchmarks.encoding --rows 1000000

Rows of about 200 tokens, a prompt and a completion of one message each, SmolLM2's tokenizer and
template. Each measurement runs in a separate process with its children. `ours`: encode the file,
read 1,000 random rows, draw the order of an epoch; `again`: the same from the cache. `map`: a
script with datasets: load_dataset("json"), template and tokenizer in a map, without masked labels.
`trl`: SFTTrainer up to its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import table
from peftkit.base.locate import locate

WORDS = "the order of pizza street large small with olives and cheese to Ann".split()  # noqa: SIM905


def main() -> None:
    """Measure, and print a row for each method and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--against", choices=["map", "trl"], nargs="*", default=[])
    parser.add_argument("--peers", default=sys.executable, help="python of an environment with trl")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    print(
        f"{asked.processes} processes; MiB above imports, all processes together, the most at once"
    )
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for number in asked.rows:
            path = Path(folder) / f"{number}.jsonl"
            write_rows(path, number)
            for way in ("ours", "again", *asked.against):
                python = asked.peers if way == "trl" else sys.executable
                found = in_process(way, path, asked.processes, python)
                sizes = (f"{found[kind] / 2**20:,.0f}" for kind in ("anonymous", "mapped"))
                seconds = found["seconds"]
                lines.append(
                    (way, f"{number:,}", f"{seconds:.1f}", f"{number / seconds:,.0f}", *sizes)
                )
                print(*lines[-1], file=sys.stderr, flush=True)
    print(table(("way", "rows", "seconds", "rows/s", "anonymous", "mapped"), lines))


def in_process(way: str, path: Path, processes: int, python: str) -> dict[str, float]:
    """Run one measurement in a separate process."""
    job = {
        "way": way,
        "path": str(path),
        "processes": processes,
        "tokenizer": locate("smollm2-135m").source,
    }
    file = path.with_suffix(".job.json")
    file.write_text(json.dumps(job))
    cache = {"HF_DATASETS_CACHE": str(path.with_suffix(".cache"))}
    quiet = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, "-m", "benchmarks.workers.encode", str(file)]
    env = os.environ | cache | quiet
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_rows(path: Path, number: int) -> None:
    """Write rows of about 200 tokens."""
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for n in range(number):
            text = " ".join(rng.choices(WORDS, k=rng.randint(100, 200)))
            said = ((("prompt", "user"), f"{n} {text}"), (("completion", "assistant"), text[:120]))
            row = {key: [{"role": role, "content": told}] for (key, role), told in said}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
