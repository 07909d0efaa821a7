"""LoRA on every class of the installed transformers, or every method on some architectures.

    python -m benchmarks.coverage                                    # every class
    python -m benchmarks.coverage --families causal,T5ForConditionalGeneration
    python -m benchmarks.coverage --page docs/models.md              # every class, as that page
    python -m benchmarks.coverage --page docs/models.md --families image   # other rows stay
    python -m benchmarks.coverage --methods lora,dora --architectures llama,t5 --quantize none,nf4
    python -m benchmarks.coverage --quantize none --skip compiling_changes_nothing   # the slow one

Columns of classes are those of tests/helpers/family_laws.py. With --methods, --architectures,
--quantize, --skip or --json there is a table of methods and architectures, of which no cell is
empty: a cell is `pass`, perhaps with a note, or `n/a` with the reason, or FAIL; the text below the
table explains notes, reasons and failures. Exits 1 when a cell fails. Models are tiny and random.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from tests.helpers.family_laws import COLUMNS, Result, results_in_child
from tests.helpers.installed import KINDS, Family, installed

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


# ------------------------------------------------------------------- classes of transformers

Rows = dict[Family, dict[str, Result]]
INTRODUCTION = """# Models

LoRA on all linear layers of every class that transformers {version} registers for text, speech or
several media. Models are tiny and random, made from each class's config; classes for several media
are tried with text. A class whose cells all say no could not be built or called: its config or its
inputs need values that no rule gives. A dash is a column that does not apply or was not tried.
`python -m benchmarks.coverage --page docs/models.md` writes this page; with `--families` it
rewrites the rows of some classes or kinds.

| column | what holds |
|---|---|"""


def families(names: str) -> Rows:
    """Return the row of each class, or of those of some kinds or names."""
    every = list(installed())
    if names != "all":
        known = dict.fromkeys(name for one in every for name in (one.kind, one.name))
        wanted = chosen(names, list(known), "class or kind")
        every = [one for one in every if {one.kind, one.name} & {*wanted}]
    rows: Rows = {}
    for number, family in enumerate(every, start=1):
        rows[family] = results_in_child(family)
        failed = [name for name, cell in rows[family].items() if cell.state == "fails"]
        print(f"{number}/{len(every)} {family}", *failed, file=sys.stderr)
    return rows


def page(rows: Rows) -> Iterator[str]:
    """Yield the lines of docs/models.md."""
    yield INTRODUCTION.format(version=transformers.__version__)
    yield from (f"| {column.__name__} | {column.__doc__} |" for column in COLUMNS)
    names = [column.__name__ for column in COLUMNS]
    yield f"\n| kind | classes | {' | '.join(names)} |\n|---|---:|{'---:|' * len(names)}"
    for kind in KINDS:
        cells = [row for family, row in rows.items() if family.kind == kind]
        if not cells:
            continue
        states = [[row[name].state for row in cells if name in row] for name in names]
        counts = [f"{s.count('works')} of {len(s) - s.count('none')}" for s in states]
        yield f"| {kind} | {len(cells)} | {' | '.join(counts)} |"
    reasons: dict[str, int] = {}
    for kind in KINDS:
        if any(family.kind == kind for family in rows):
            yield f"\n## {kind.capitalize()}\n\n| class | {' | '.join(names)} |"
            yield f"|---|{'---|' * len(names)}"
        for family, row in rows.items():
            if family.kind == kind:
                none = row.get("build", Result("-", "none"))
                cells_of_row = (_mark(row.get(name, none), family, reasons) for name in names)
                yield f"| `{family}` | {' | '.join(cells_of_row)} |"
    yield "\n## Reasons\n"
    yield from (f"{number}. {reason}" for reason, number in reasons.items())


def read_page(text: str) -> Rows:
    """Return the rows of a page of the installed transformers."""
    if f"transformers {transformers.__version__} " not in text:
        return {}
    reasons = dict(re.findall(r"^(\d+)\. (.*)\.$", text, re.MULTILINE))
    cells = {
        name: [_unmark(cell, reasons) for cell in line.split(" | ")]
        for name, line in re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    }
    rows: Rows = {}
    for family in installed():
        row = cells.get(family.name, [])
        if row and row[0].state in ("fails", "refused") and len({*row}) == 1:
            rows[family] = {"build": row[0]}
        elif row:
            rows[family] = {c.__name__: cell for c, cell in zip(COLUMNS, row, strict=True)}
    return rows


def _unmark(cell: str, reasons: dict[str, str]) -> Result:
    """Return what `_mark` made a cell of."""
    text, _, number = cell.rstrip(")").rpartition(" (")
    if number not in reasons:
        return Result(cell, "none" if cell == "-" else "works")
    if text in ("no", "refused"):
        return Result(reasons[number], "fails" if text == "no" else text)
    return Result(f"{text}: {reasons[number]}")


def _mark(cell: Result, family: Family, reasons: dict[str, int]) -> str:
    """Return a cell of the page; its reason gets a number."""
    if cell.state == "none" or not cell.text:
        return "-"
    text, _, reason = cell.text.partition(": ") if cell.state == "works" else ("", "", cell.text)
    if not reason:
        return text if text != "equal" else "yes"
    reason = (
        reason.replace(str(family), "The class").translate({124: "/", 96: "'"}).rstrip(".") + "."
    )
    number = reasons.setdefault(reason, len(reasons) + 1)
    return f"{text or ('refused' if cell.state == 'refused' else 'no')} ({number})"


def chosen(words: str, known: Sequence[str], what: str) -> list[str]:
    """Return the names of a list with commas; all for "all"."""
    names = list(known) if words == "all" else words.split(",")
    if strange := [name for name in names if name not in known]:
        raise SystemExit(f"no {what} is called {', '.join(strange)}; there are {', '.join(known)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default="all", help="classes of transformers, or kinds")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the table of classes there"
    )
    parser.add_argument("--methods", help="of the columns, with commas")
    parser.add_argument("--architectures", help="of the rows, with commas")
    parser.add_argument("--quantize", help="none, nf4, or both with a comma")
    parser.add_argument("--skip", default="", help="laws not to ask, with commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    args = parser.parse_args(argv)
    if not any((args.methods, args.architectures, args.quantize, args.skip, args.json)):
        return _print_families(args.families, args.page)
    methods = chosen(args.methods or "all", list(grid.COLUMNS), "method")
    architectures = chosen(args.architectures or "all", list(ARCHITECTURES), "architecture")
    bases = chosen(args.quantize or "none", QUANTIZE, "base")
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


def _print_families(names: str, file: Path | None) -> int:
    quiet()
    rows = families(names)
    failed = any(cell.state == "fails" for row in rows.values() for cell in row.values())
    if file and names != "all":
        rows = {**read_page(file.read_text(encoding="utf-8")), **rows}
        rows = {family: rows[family] for family in installed() if family in rows}
    text = "\n".join(page(rows))
    print(text)
    if file:
        file.write_text(text + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
