"""Time of --help, opening an adapter, merging it, and reaching the first step.

    python -m benchmarks.startup --peers PEERS/bin/python

Each is a separate program, timed from outside, alternating with its peer; medians over --repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.orders import make_rows
from benchmarks.report import Spread, heading, table, versions, write_json
from benchmarks.workers import work

MAKE = """
import sys, torch
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.peft.folder import save_adapter
from peftkit.methods.lora import LoRA
base = load_base(sys.argv[1])
adapter = attach(base.model, LoRA(rank=16, alpha=32))
with torch.no_grad():
    for module in adapter.modules.values():
        module.lora_B.normal_(std=0.01)
save_adapter(adapter, sys.argv[2], Provenance())
"""
OPEN = """
import sys
from peftkit.formats.open_adapter import open_adapter
open_adapter(sys.argv[2], sys.argv[1])
"""
PEFT_OPEN = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
"""
MERGE = """
import sys
from peftkit.merging.merge import merge
merge(sys.argv[2], sys.argv[3], base=sys.argv[1], dtype="bf16", verify={verify})
"""
PEFT_MERGE = (
    PEFT_OPEN
    + """
model.merge_and_unload().save_pretrained(sys.argv[3])
tokenizer.save_pretrained(sys.argv[3])
"""
)


@dataclass(frozen=True, slots=True)
class Taken:
    """Time and memory of a program."""

    seconds: float
    peak_bytes: int


def take(command: Sequence[str], environ: dict[str, str]) -> Taken:
    """Run a program to its end.

    Its peak is counted by the kernel from this process's memory, which is small: it imports no
    torch.

    Raises:
        RuntimeError: The program failed.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=said, cwd=tempfile.gettempdir()
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        if process.returncode:
            said.seek(0)
            told = said.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{command[:3]} failed:\n{told}")
    return Taken(seconds, usage.ru_maxrss * 1024)


def programs(source: str, adapter: Path, out: Path, peers: str) -> dict[str, dict[str, list[str]]]:
    """Return the timed commands: name -> side -> command."""

    def of(python: str, code: str) -> list[str]:
        return [python, "-c", code, source, str(adapter), str(out)]

    ours = sys.executable
    trl = str(Path(peers).with_name("trl"))
    return {
        "--help": {"ours": [ours, "-m", "peftkit_cli", "--help"], "peer": [trl, "--help"]},
        "train --help": {
            "ours": [ours, "-m", "peftkit_cli", "train", "--help"],
            "peer": [trl, "sft", "--help"],
        },
        "open an adapter": {"ours": of(ours, OPEN), "peer": of(peers, PEFT_OPEN)},
        "merge": {
            "ours": of(ours, MERGE.format(verify=False)),
            "peer": of(peers, PEFT_MERGE),
        },
        "merge, result verified": {"ours": of(ours, MERGE.format(verify=True))},
    }


def first_step(job: dict[str, Any], side: str, python: str, folder: Path) -> Taken:
    """Return the time from the start of a training program to the end of its first step."""
    facts = work(side, job, folder, python=python)
    return Taken(facts["first_step_seconds"], facts["peak_bytes"])


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[Taken]]]:
    """Time all commands alternately."""
    from peftkit.base.locate import locate

    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    source, adapter, out = locate(args.model).source, folder / "adapter", folder / "merged"
    take([sys.executable, "-c", MAKE, source, str(adapter)], environ)
    found: dict[str, dict[str, list[Taken]]] = {}
    for name, sides in programs(source, adapter, out, args.peers).items():
        found[name] = {side: [] for side in sides}
        for _ in range(args.repeats):
            for side, command in sides.items():
                found[name][side].append(take(command, environ))
                shutil.rmtree(out, ignore_errors=True)
        print(f"{name}: done", file=sys.stderr, flush=True)
    rows = _encoded(source, make_rows(folder, 8))
    job = {"source": source, "task": "causal_lm", "rows": rows, "dtype": "bf16", "device": "auto"}
    job |= {"quantize": "none", "rank": 16, "batch_size": 8, "learning_rate": 2e-4}
    steps: dict[str, list[Taken]] = {"ours": [], "peer": []}
    for _ in range(args.repeats):
        steps["ours"].append(first_step(job, "ours", sys.executable, folder))
        steps["peer"].append(first_step(job, "trl", args.peers, folder))
    return found | {"first training step": steps}


def _encoded(source: str, data: Path) -> list[dict[str, list[int]]]:
    """Return rows as tokens, from a separate process, which keeps this one small."""
    code = (
        "import json, sys; from benchmarks.train import encode; "
        "print(json.dumps(encode(sys.argv[1], sys.argv[2], 8, 512)))"
    )

    command = [sys.executable, "-c", code, source, str(data)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return json.loads(done.stdout.splitlines()[-1])


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peers", required=True, help="python with trl and peft")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the measurements here")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    lines, figures = [], {}
    for name, sides in found.items():
        spreads = {side: Spread.of([run.seconds for run in runs]) for side, runs in sides.items()}
        peaks = {side: max(run.peak_bytes for run in runs) for side, runs in sides.items()}
        figures[name] = {side: [[r.seconds, r.peak_bytes] for r in sides[side]] for side in sides}
        peer = spreads.get("peer")
        lines.append(
            [
                name,
                f"{spreads['ours'].show(2)} s",
                f"{peer.show(2)} s" if peer else "",
                f"{peer.median / spreads['ours'].median:.2f} x" if peer else "",
                f"{peaks['ours'] / 1e9:.2f} GB",
                f"{peaks['peer'] / 1e9:.2f} GB" if peer else "",
            ]
        )
    print(heading({"ours": versions()}))
    print(f"{args.model}; medians of {args.repeats} programs in turn\n")
    columns = ("", "ours (least-most)", "PEFT, TRL", "ours: speed", "our peak", "their peak")
    print(table(columns, lines))
    write_json(args.json, {"figures": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
