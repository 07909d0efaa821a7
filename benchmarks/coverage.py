"""Does every method obey every law on every architecture? One table, no cell empty.

    python -m benchmarks.coverage                                # all of it
    python -m benchmarks.coverage --methods lora,dora --architectures llama,t5 --quantize none,nf4
    python -m benchmarks.coverage --skip compiling_changes_nothing   # the slow one

A cell is `pass`, perhaps with a note, or `n/a` with the reason, or FAIL; the text below the table
explains notes, reasons and failures. Exits 1 when a cell fails. Models are tiny and random.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from tests.helpers import grid, laws
from tests.helpers.families import ARCHITECTURES

QUANTIZE = ("none", "nf4")


class Key(NamedTuple):
    """Names a cell."""

    architecture: str
    method: str
    quantize: str


def run_row(keys: Sequence[Key], skipped: Sequence[str]) -> dict[Key, laws.Outcome]:
    """Check all laws of some cells, in this process."""
    asked = [law for law in laws.LAWS if law.__name__ not in skipped]
    return {key: laws.check(key.method, key.architecture, key.quantize, asked) for key in keys}


def run(keys: Sequence[Key], skipped: Sequence[str], jobs: int) -> dict[Key, laws.Outcome]:
    """Check all laws of all cells, a row at a time; with one job in this process."""
    rows: dict[tuple[str, str], list[Key]] = {}
    for key in keys:
        rows.setdefault((key.architecture, key.quantize), []).append(key)
    found: dict[Key, laws.Outcome] = {}
    with_bos = time.monotonic()
    for number, cells in enumerate(_rows(list(rows.values()), skipped, jobs), start=1):
        found |= cells
        seconds = time.monotonic() - with_bos
        print(f"{number}/{len(rows)} rows, {len(found)} cells, {seconds:.0f} s", file=sys.stderr)
        print(*_failures(cells), sep="", end="", file=sys.stderr)
    return found


def _rows(
    rows: list[list[Key]], skipped: Sequence[str], jobs: int
) -> Iterator[dict[Key, laws.Outcome]]:
    if jobs == 1:
        yield from (run_row(row, skipped) for row in rows)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=quiet) as pool:
        done = [pool.submit(run_row, row, skipped) for row in rows]
        yield from (row.result() for row in done)


def quiet() -> None:
    """Limit a process to one core, and silence its warnings."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def table(found: dict[Key, laws.Outcome], quantize: str) -> Iterator[str]:
    """Yield the lines of one table."""
    methods = list(dict.fromkeys(key.method for key in found))
    architectures = list(dict.fromkeys(key.architecture for key in found))
    cells = {key: str(outcome) for key, outcome in found.items() if key.quantize == quantize}
    width = {
        m: max(len(m), *(len(cells[Key(a, m, quantize)]) for a in architectures)) for m in methods
    }
    first = max(map(len, architectures))
    yield f"base: {quantize}"
    yield "  ".join([" " * first, *(f"{m:{width[m]}}" for m in methods)]).rstrip()
    for name in architectures:
        row = (f"{cells[Key(name, m, quantize)]:{width[m]}}" for m in methods)
        yield "  ".join([f"{name:{first}}", *row]).rstrip()


def legend(found: dict[Key, laws.Outcome], skipped: Sequence[str]) -> Iterator[str]:
    """Yield the explanation of cells: their laws, notes, reasons and failures."""
    yield "pass: all of these hold"
    for law in laws.LAWS:
        if law.__name__ not in skipped:
            yield f"  {law.__name__}: {law.__doc__}"
    for codes, meanings in (
        ({note for o in found.values() for note in o.notes}, grid.NOTES),
        ({o.refusal for o in found.values() if o.refusal}, grid.REASONS),
    ):
        prefix = "pass " if meanings is grid.NOTES else "n/a:"
        yield from (f"{prefix}{code}: {meanings[code]}" for code in sorted(codes))
    yield from (line.rstrip() for line in _failures(found))


def _failures(found: dict[Key, laws.Outcome]) -> Iterator[str]:
    for key, outcome in found.items():
        for failure in outcome.failures:
            yield f"FAIL {' '.join(key)}: {' '.join(failure.split())}\n"


def chosen(words: str, known: Sequence[str], what: str) -> list[str]:
    """Return the names of a list with commas; all for "all"."""
    names = list(known) if words == "all" else words.split(",")
    if strange := [name for name in names if name not in known]:
        raise SystemExit(f"no {what} is called {', '.join(strange)}; there are {', '.join(known)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="all", help="of the columns, with commas")
    parser.add_argument("--architectures", default="all", help="of the rows, with commas")
    parser.add_argument("--quantize", default="none", help="none, nf4, or both with a comma")
    parser.add_argument("--skip", default="", help="laws not to ask, with commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    args = parser.parse_args(argv)
    methods = chosen(args.methods, list(grid.COLUMNS), "method")
    architectures = chosen(args.architectures, list(ARCHITECTURES), "architecture")
    bases = chosen(args.quantize, QUANTIZE, "base")
    names = [law.__name__ for law in laws.LAWS]
    skipped = chosen(args.skip, names, "law") if args.skip else []
    keys = [Key(a, m, q) for q in bases for a in architectures for m in methods]
    with_bos = time.monotonic()
    found = run(keys, skipped, args.jobs)
    for quantize in bases:
        print(*table(found, quantize), "", sep="\n")
    print(*legend(found, skipped), sep="\n")
    failed = sum(bool(outcome.failures) for outcome in found.values())
    refused = sum(bool(outcome.refusal) for outcome in found.values())
    print(
        f"{len(found)} cells: {len(found) - failed - refused} pass, {refused} n/a, {failed} FAIL; "
        f"{time.monotonic() - with_bos:.0f} s; torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    if args.json:
        cells = [key._asdict() | asdict(outcome) for key, outcome in found.items()]
        args.json.write_text(json.dumps(cells, indent=1), encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
