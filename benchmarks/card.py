"""Checks and measurements of each part of the code on a GPU, as one Markdown page.

    python -m benchmarks.card
    python -m benchmarks.card --part operators --out card.md   # one part, below ten minutes
    python -m benchmarks.card --carry FOLDER                   # for a machine without a network

No part needs a peer or a certain card: 16 bits first, kernels compared with their definitions in
float64, training and generation compared with the CPU and with themselves, a released shape with
its plan, and runs with the memory of smaller cards. If a part fails, its error is recorded and the
others continue; the page is extended after each part. Weights and tokens are random. benchmarks.gpu
compares with peers.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import card_operators, card_runs, shapes
from benchmarks.card_carry import PACKAGES, carry
from benchmarks.card_job import Job, Line, Part, left_clean
from benchmarks.report import table
from peftkit.execution.environment import as_current

PARTS: dict[str, Part] = {
    "environment": card_runs.environment,
    "operators": card_operators.operators,
    "attention": card_operators.attention,
    "activations": card_runs.activations,
    "training": card_runs.training,
    "decoding": card_runs.decoding,
    "large": card_runs.large,
    "caps": card_runs.caps,
    "memory": card_runs.memory,
    "compiled": card_runs.compiled,
    "suite": card_runs.suite,
}
"""The main path first."""


def run_part(job: Job, name: str) -> tuple[str, bool]:
    """Return a part's results in Markdown, and whether all of them are good."""
    part, lines, problem = PARTS[name], list[Line](), ""
    began = time.perf_counter()
    with left_clean():
        try:
            for line in part(copy.copy(job)):
                lines.append(line)
                print(" | ".join(line), flush=True)
        except Exception:
            problem = f"```\n{traceback.format_exc(limit=-3)}```"
    is_well = not problem and not any(cell == "NO" for line in lines for cell in line)
    shown = [f"## {name}", str(part.__doc__)]
    shown += [table(lines[0], lines[1:])] if lines else []
    shown += [problem] if problem else []
    return "\n\n".join([*shown, f"{time.perf_counter() - began:.0f} s"]), is_well


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--part", "--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", default="smollm2-135m", choices=sorted(shapes.SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--large", default="llama-3.1-8b", choices=sorted(shapes.SHAPES))
    parser.add_argument("--large-layers", type=int, help="fewer blocks")
    parser.add_argument("--large-lengths", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--caps", type=float, nargs="*", default=[24, 16, 12, 8], help="GB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("card.md"), help="the page to send home")
    parser.add_argument("--carry", type=Path, help="only fill this folder, for a bare machine")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="that --carry takes along")
    parser.add_argument("--python", default="3.12", help="of the machine that --carry is for")
    parser.add_argument("--cuda", default="130", help="likewise, as torch names it")
    args = parser.parse_args(argv)
    args.part = args.part.split(",")
    if unknown := set(args.part) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if a result is bad, 2 without a GPU."""
    args = arguments(argv)
    if args.carry is not None:
        size = carry(args.carry, args.packages, args.python, args.cuda)
        print(f"{args.carry}: {size >> 20} MiB. There: PYTHONPATH={args.carry.name}")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here.", file=sys.stderr)
        return 2
    device = as_current(torch.device(args.device))
    lengths, caps = tuple(args.large_lengths), tuple(args.caps)
    small = (args.model, args.layers, args.length)
    job = Job(device, *small, args.large, args.large_layers, lengths, caps)
    shown, is_well = ["# Results of this card"], True
    for name in args.part:
        print(f"\n{name}", flush=True)
        text, part_is_well = run_part(job, name)
        is_well &= part_is_well
        shown.append(text)
        args.out.write_text("\n\n".join(shown) + "\n", encoding="utf-8")
    print(f"\nwritten: {args.out}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
