"""Checks and measurements of each part of the code on a GPU, as one Markdown page.

    python -m benchmarks.card
    python -m benchmarks.card --part first    # below ten minutes on an H100; prints one table
    python -m benchmarks.card --part operators --out card.md   # one part, below ten minutes
    python -m benchmarks.card --part peers --peers PEERS/bin/python --unsloth UNSLOTH/bin/python
    python -m benchmarks.card --carry FOLDER                   # for a machine without a network

Each part runs in a process with a time limit, and extends its file in the folder of the page (card/
next to card.md) with each line. A part that fails, hangs or is killed ends alone. The first hour
comes first: the environment, kernels compared with their definitions in float64, an 8B shape with
its plan, peers on the same checkpoint, GRPO, decoding over long keys and with growing caches,
smaller cards. Weights and tokens are random. Only `peers` needs other environments; a missing one
is reported and skipped.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import shapes
from benchmarks.all import tables_in
from benchmarks.card import answers, decode, disk, operators, peers, probe, products, runs
from benchmarks.card.carry import PACKAGES, carry, carry_run
from benchmarks.card.job import Job, Line, Part, left_clean
from benchmarks.card.process import STATUS_BAD, STATUS_WELL, command, run_apart
from benchmarks.report import table
from peftkit.execution.environment import as_current

PARTS: dict[str, Part] = {
    "environment": probe.environment,
    "operators": operators.operators,
    "products": products.products,
    "large": runs.large,
    "packed": disk.packed,
    "peers": peers.peers,
    "grpo": disk.grpo,
    "split": decode.split,
    "growth": decode.growth,
    "engines": decode.engines,
    "caps": disk.caps,
    "attention": operators.attention,
    "activations": runs.activations,
    "training": runs.training,
    "decoding": runs.decoding,
    "memory": runs.memory,
    "compiled": runs.compiled,
    "recorded": runs.recorded,
    "quickstart": answers.quickstart,
    "errors": answers.errors,
    "answers": answers.answers,
    "suite": runs.suite,
}
"""The first hour first."""
FIRST = ("quickstart", "compiled", "recorded", "errors", "peers", "answers", "grpo")
FIRST_OPTIONS = (
    *("--sides", "ours,ours-eager,ours-recompute,unsloth,trl-liger", "--repeats", "1", "--fixed"),
    *("--large-lengths", "2048", "--batch-size", "4", "--new-tokens", "128"),
)
"""Parts and options of `--part first`; options of the command line take precedence."""
SECONDS = {"environment": 180, "packed": 1200, "peers": 3600, "growth": 1200, "suite": 1800}
OTHER_SECONDS = 900
"""Time limits of the parts' processes."""
ON_OTHERS = ("peers",)
"""Parts whose own process must not take memory of the card: its workers measure."""


def run_part(job: Job, name: str, page: Path) -> bool:
    """Run a part in this process; extend its page with each line; return whether all are good."""
    part, lines, problem = PARTS[name], list[Line](), ""
    began = time.perf_counter()

    def write(*last: str) -> None:
        shown = [f"## {name}", str(part.__doc__)]
        shown += [table(lines[0], lines[1:])] if lines else []
        page.write_text("\n\n".join([*shown, *last]) + "\n", encoding="utf-8")

    with left_clean():
        try:
            for line in part(copy.copy(job)):
                lines.append(line)
                print(" | ".join(line), flush=True)
                write()
        except Exception:
            problem = f"```\n{traceback.format_exc(limit=-3)}```"
    write(*filter(None, (problem, f"{time.perf_counter() - began:.0f} s")))
    return not problem and not any(cell == "NO" for line in lines for cell in line)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--part", "--parts", default=",".join(PARTS), help=f"first, or of {', '.join(PARTS)}"
    )
    parser.add_argument("--model", default="smollm2-135m", choices=sorted(shapes.SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--large", default="llama-3.1-8b", choices=sorted(shapes.SHAPES))
    parser.add_argument("--large-layers", type=int, help="fewer blocks")
    parser.add_argument("--large-lengths", type=int, nargs="*", default=[1024, 3500, 8192, 32768])
    parser.add_argument("--caps", type=float, nargs="*", default=[24, 16, 12, 8, 6], help="GB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("card.md"), help="the page to send home")
    parser.add_argument("--peers", default=sys.executable, help="python with trl, peft, liger")
    parser.add_argument("--unsloth", help="python with unsloth")
    parser.add_argument("--sides", default="", help="of `peers`, by default all: ours,unsloth,...")
    parser.add_argument("--fixed", action="store_true", help="rows of one length from a checkpoint")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side of `peers`")
    parser.add_argument("--checkpoint", type=Path, help="of the shape --large; else random weights")
    parser.add_argument("--rows", type=Path, help="JSON lines with input_ids; else random tokens")
    parser.add_argument("--batch-size", type=int, default=8, help="of runs from the checkpoint")
    parser.add_argument("--steps", type=int, default=8, help="likewise")
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 8192, 32768])
    parser.add_argument("--answers", type=int, nargs="*", default=[1, 8, 64], help="at once")
    parser.add_argument("--new-tokens", type=int, default=300, help="of an answer")
    parser.add_argument("--probe", type=int, default=8192, help="size of the measured products")
    parser.add_argument("--product", type=int, default=4096, help="size of packed weights")
    parser.add_argument("--seconds", type=float, help="time limit of every part")
    parser.add_argument("--here", action="store_true", help="run the parts in this process")
    parser.add_argument("--carry", type=Path, help="only fill this folder, for a bare machine")
    parser.add_argument("--with-weights", action="store_true", help="--carry the checkpoint too")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="that --carry takes along")
    parser.add_argument("--python", default="3.12", help="of the machine that --carry is for")
    parser.add_argument("--cuda", default="130", help="likewise, as torch names it")
    args = parser.parse_args(argv)
    if args.part == "first":
        args = parser.parse_args([*FIRST_OPTIONS, *(argv or ())])
        args.part = ",".join(FIRST)
    args.part = args.part.split(",")
    if unknown := set(args.part) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    return args


def job_of(args: argparse.Namespace, device: torch.device) -> Job:
    """Return the settings of the parts."""
    return Job(
        device,
        *(args.model, args.layers, args.length),
        *(args.large, args.large_layers, tuple(args.large_lengths), tuple(args.caps)),
        folder=args.out.resolve().parent if args.here else folder_of(args.out),
        checkpoint=args.checkpoint,
        rows=args.rows,
        peers=args.peers,
        unsloth=args.unsloth,
        sides=tuple(filter(None, args.sides.split(","))),
        fixed=args.fixed,
        repeats=args.repeats,
        batch_size=args.batch_size,
        num_steps=args.steps,
        contexts=tuple(args.contexts),
        answer_rows=tuple(args.answers),
        new_tokens=args.new_tokens,
        probe_size=args.probe,
        product_size=args.product,
    )


def folder_of(page: Path) -> Path:
    """Return the folder of the parts' files next to a page."""
    return page.resolve().with_suffix("")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if a result is bad, 2 without a GPU."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = arguments(words)
    if args.carry is not None:
        size = carry(args.carry, args.packages, args.python, args.cuda)
        job = job_of(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        options = carry_run(args.carry, job, with_weights=args.with_weights)
        print(f"{args.carry}: {size >> 20} MiB of packages. There: PYTHONPATH={args.carry.name} ")
        print(f"python -m benchmarks.card {' '.join(options)}")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here.", file=sys.stderr)
        return 2
    is_well = run_here(args) if args.here else run_all(args, words)
    return STATUS_WELL if is_well else STATUS_BAD


def run_here(args: argparse.Namespace) -> bool:
    """Run the parts in this process; the page has the last one."""
    device = torch.device(args.device)
    if not set(args.part) <= set(ON_OTHERS):
        device = as_current(device)
    results = [run_part(job_of(args, device), name, args.out) for name in args.part]
    return all(results)


def run_all(args: argparse.Namespace, words: Sequence[str]) -> bool:
    """Run each part in a process of its own; extend the page after each."""
    shown, is_well = ["# Results of this card"], True
    is_first = args.part == list(FIRST)
    words = [*FIRST_OPTIONS, *words] if is_first else words
    for name in args.part:
        print(f"\n{name}", file=sys.stderr, flush=True)
        page = folder_of(args.out) / f"{name}.md"
        seconds = args.seconds or SECONDS.get(name, OTHER_SECONDS)
        text, part_is_well = run_apart(command(words, name, page), name, page, seconds)
        is_well &= part_is_well
        shown.append(text)
        args.out.write_text("\n\n".join(shown) + "\n", encoding="utf-8")
    print(f"\nwritten: {args.out}", file=sys.stderr)
    if is_first:
        print(one_table(dict(zip(args.part, shown[1:], strict=True))))
    return is_well


def one_table(pages: Mapping[str, str]) -> str:
    """Return the tables of several parts as one: a row's first cell, its figures, its verdict."""
    rows = []
    for name, text in pages.items():
        for (_, *columns, _), *lines in tables_in(text):
            for what, *cells, well in lines:
                pairs = zip(columns, cells, strict=True)
                figures = "; ".join(f"{column} {cell}" for column, cell in pairs if cell)
                rows.append((name, what, figures, well))
    return table(("part", "what", "figures", "well"), rows)


if __name__ == "__main__":
    sys.exit(main())
