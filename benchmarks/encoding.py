"""How fast rows become tokens, and how much memory they take: at 10,000, 100,000 and more rows.

    python -m benchmarks.encoding                       # 10,000 and 100,000 rows
    python -m benchmarks.encoding --rows 1000000 --against map

Rows of about 200 tokens, alpaca's format, the base's own tokenizer. Each measurement is a process
of its own. `ours`: from the file to rows that can be trained on, then 1,000 of them read at random;
`again`: the same, encoded before. `map`: what a script with datasets does: load_dataset("json"),
the chat template and the tokenizer in a plain map, no labels told apart; TRL does so and masks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = "the order of pizza street large small with olives and cheese to Ann".split()  # noqa: SIM905


def main() -> None:
    """Measure, and print a line for each way and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--against", choices=["map"], nargs="*", default=[])
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(measure(*asked.worker, asked.processes)))
        return
    print(
        f"{'rows':>10}  {'way':6} {'seconds':>8} {'rows/s':>9} {'memory':>9}  (MiB, above imports)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for number in asked.rows:
            path = Path(folder) / f"{number}.jsonl"
            write_rows(path, number)
            cache = Path(folder) / f"cache-{number}"
            for way in ("ours", "again", *asked.against):
                found = in_process(way, path, cache, asked.processes)
                print(
                    f"{number:>10,}  {way:6} {found['seconds']:8.1f} "
                    f"{number / found['seconds']:9,.0f} {found['bytes'] / 2**20:9,.0f}",
                    flush=True,
                )


def in_process(way: str, path: Path, cache: Path, processes: int | None) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.encoding", "--worker", way, str(path)]
    if processes is not None:
        command += ["--processes", str(processes)]
    known = os.environ | {"HF_DATASETS_CACHE": str(cache), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, env=known, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_rows(path: Path, number: int) -> None:
    """Write rows of about 200 tokens."""
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for n in range(number):
            text = " ".join(rng.choices(WORDS, k=rng.randint(100, 200)))
            file.write(json.dumps({"instruction": f"{n} {text}", "output": text[:120]}) + "\n")


def measure(way: str, path: str, processes: int | None) -> dict[str, float]:
    """Encode a file; return the seconds, and the peak of memory above that of imports."""
    import torch  # noqa: F401 - what a run has loaded anyway
    from transformers import AutoTokenizer

    from peftkit.base.locate import locate

    tokenizer = AutoTokenizer.from_pretrained(locate("smollm2-135m").source)
    tokenizer("warm up")
    import datasets
    import pyarrow  # noqa: F401 - likewise

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    if way == "map":

        def encode(row: dict[str, str]) -> dict[str, list[int]]:
            turns = [
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["output"]},
            ]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            return {"input_ids": tokenizer(text)["input_ids"]}

        rows = datasets.load_dataset("json", data_files=path, split="train")
        known = rows.map(encode, remove_columns=rows.column_names, num_proc=processes)
    else:
        from peftkit.data.encoding import Settings
        from peftkit.data.stored import encoded

        known = encoded(path, Settings(tokenizer, None, "auto", 1024), processes=processes)
    chosen = random.Random(0).choices(range(len(known)), k=1_000)
    total = sum(len(known[n]["input_ids"] if way == "map" else known[n].input_ids) for n in chosen)
    assert total > 0
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "bytes": float((peak - before) * 1024)}


if __name__ == "__main__":
    main()
