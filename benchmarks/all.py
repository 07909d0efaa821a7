"""Run the benchmarks behind the tables in README.md and docs/, and write the tables.

    python -m benchmarks.all                       # all stale figures, shortest first
    python -m benchmarks.all train growth --peers PEERS/bin/python
    python -m benchmarks.all --write               # only the tables, from the files

Each benchmark writes one file, benchmarks/figures/NAME.json; an interrupted run continues after its
last command. A table marks figures whose code has changed since (comments, docstrings and empty
lines do not count).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.entries import ENTRIES, PEERS, Benchmark
from benchmarks.report import machine, table, versions

ROOT = Path(__file__).parent.parent
FILES = Path(__file__).with_name("figures")
PAGES = ("README.md", "docs/performance.md", "docs/memory.md")
FULL = re.compile(r"(?s)(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)")
SUMMED = re.compile(r"(<!-- summary: ([\w -]+) -->\n\n)(?:\|.*\n)*")
SHOWN = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate")
STALE = "†"
MEANING = f"{STALE} The code that it measures has changed since."
SUMMARY = ("benchmark", f"result ({STALE}: the code has changed since)", "machine", "command")


def place(name: str) -> Path:
    """Return a file or folder of peftkit/, or an application in cli/."""
    return ROOT / ("cli" if name.startswith("peftkit_") else "peftkit") / name


def digest(measures: tuple[str, ...]) -> str:
    """Return a digest of the code of files and folders of peftkit/ and cli/."""
    found = hashlib.sha256()
    for name in sorted(set(measures)):
        path = place(name)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(f"{file.relative_to(ROOT).as_posix()}\n{code_of(file)}\n".encode())
    return found.hexdigest()[:16]


@cache
def code_of(file: Path) -> str:
    """Return a file's lines without comments, docstrings and empty lines."""
    text = file.read_text(encoding="utf-8")
    lines = dict(enumerate(text.splitlines(), start=1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines.pop(number, None)
    return "\n".join(line for line in lines.values() if not re.match(r"\s*(#|$)", line))


def stored(name: str) -> dict[str, Any] | None:
    """Return the content of a benchmark's file; None if there is none."""
    path = FILES / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def is_stale(name: str) -> bool:
    """Return whether the measured code has changed, or is unknown."""
    facts = stored(name)
    return facts is None or facts["code"] != digest(ENTRIES[name].measures)


def _minutes(name: str) -> float:
    """Return the duration of a benchmark's last run; unknown durations sort last."""
    return (stored(name) or {}).get("minutes", math.inf)


# ----------------------------------------------------------------------------------------- running


def measure(name: str, pythons: Mapping[str, str]) -> bool:
    """Run a benchmark's commands and write its file; return whether all commands succeeded.

    Args:
        pythons: Interpreters of other environments, by their placeholders in commands.
    """
    entry, outputs = ENTRIES[name], []
    code, commit = digest(entry.measures), _commit()
    before, known = machine(), {"ours": versions()}
    known |= {word.lower(): _versions(pythons[word]) for word in entry.needs}
    began, environ = time.perf_counter(), dict(os.environ)
    for command in entry.commands:
        words = [pythons.get(word, word) for word in shlex.split(command)]
        given = list(itertools.takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
        python = [sys.executable, *words[len(given) + 1 :]]
        environ = os.environ | dict(word.split("=", 1) for word in given)
        environ |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}
        ran = subprocess.run(python, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ)
        if ran.returncode:
            print(f"{name}: {command} ended with {ran.returncode}", file=sys.stderr)
            return False
        outputs.append(ran.stdout)
        print(ran.stdout, file=sys.stderr, flush=True)  # what took minutes is not lost
    facts = {
        "commands": entry.commands,
        "commit": commit,
        "code": code,
        "cpu": before["cpu"],
        "cores": before["cores"],
        "threads": environ.get("OMP_NUM_THREADS", "all"),
        "load": [before["load"], machine()["load"]],
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "versions": known,
        "figures": figures_in(entry, "\n".join(outputs)),
        "tables": [part for output in outputs for part in tables_in(output)],
        "lines": [line for output in outputs for line in lines_in(output)],
    }
    FILES.mkdir(exist_ok=True)
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    (FILES / f"{name}.json").write_text(text, encoding="utf-8")
    return True


def _commit() -> str:
    """Return the commit of the code, with -dirty if other files than figures and pages changed."""
    written = [f":!{path}" for path in (*PAGES, FILES.relative_to(ROOT).as_posix())]
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + "-dirty" * bool(_git("status", "--porcelain", "-uno", "--", ".", *written))
    except OSError:  # no git here
        return ""


def _git(*words: str) -> str:
    ran = subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT)
    return ran.stdout.strip()


def _versions(python: str) -> dict[str, str]:
    code = "import json; from benchmarks.report import versions; print(json.dumps(versions()))"
    told = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return json.loads(told.stdout)


def figures_in(entry: Benchmark, output: str) -> dict[str, str]:
    """Return the figures of an output by name.

    Raises:
        ValueError: A figure is missing.
    """
    figures = {}
    for name, pattern in entry.reads.items():
        places = re.findall(pattern, output)
        if not places:
            raise ValueError(f"no {name} ({pattern}) in what {entry.commands[0]} printed")
        figures[name] = ", ".join(places)
    return figures


def tables_in(output: str) -> list[list[list[str]]]:
    """Return the cells of each Markdown table, without the rule."""
    blocks = re.findall(r"(?m)(?:^\|.*\|$\n?)+", output)
    rows = [[_cells(line) for line in block.splitlines()] for block in blocks]
    return [[lines[0], *lines[2:]] for lines in rows]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def lines_in(output: str) -> list[str]:
    """Return the lines after the first table that are outside of tables."""
    _, mark, rest = output.partition("\n|")
    lines = rest.splitlines()[1:] if mark else []
    return [line for line in lines if line.strip() and not line.startswith("|")]


# ------------------------------------------------------------------------------------------ tables


def about(facts: Mapping[str, Any]) -> str:
    """Return the machine and the commit of figures."""
    load = " to ".join(dict.fromkeys(f"{value:g}" for value in facts["load"]))
    cores = f"{facts['cores']} cores" if facts["cores"] else ""
    parts = (facts["cpu"], cores, f"load {load}" if load else "", f"commit {facts['commit']}")
    return ", ".join(filter(None, parts))


def full(name: str) -> str:
    """Return a benchmark's commands, tables and lines, and the machine."""
    facts, pattern = _of(name), ENTRIES[name].shown_rows
    commands, tables, lines = facts["commands"], facts["tables"], facts["lines"]
    if all("--repeats 1" in command for command in commands):
        tables = [[[*map(without_spread, row)] for row in rows] for rows in tables]
        lines = [without_spread(line) for line in lines]
    parts = ["\n".join(f"    {command}" for command in commands)]
    selected = [
        [rows[0], *(row for row in rows[1:] if re.search(pattern, " ".join(row)))]
        for rows in tables
    ]
    joined = joined_by_run([rows for rows in selected if rows[1:]], len(commands))
    parts += [table(columns, rows) for columns, *rows in joined]
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines) if len(lines) > 1 else lines[0])
    names = {key: value for side in facts["versions"].values() for key, value in side.items()}
    shown = ", ".join(f"{key} {names[key]}" for key in SHOWN if key in names)
    told = f"{about(facts)}{f'; {shown}' if shown else ''}."
    parts.append(f"{told} {MEANING}" if is_stale(name) else told)
    return "\n\n".join(parts)


def without_spread(cell: str) -> str:
    """Return a cell of one run without its range: `876 (876-876)` becomes `876`."""
    return re.sub(r" \(([\d.]+-[\d.]+|least-most)\)", "", cell)


def joined_by_run(tables: list[list[list[str]]], num_commands: int) -> list[list[list[str]]]:
    """Return one table for several runs of a benchmark, numbered in the order of its commands.

    If the columns differ, or if the number of tables is not `num_commands`, the tables stay
    separate. Empty columns are dropped.
    """
    if 1 < len(tables) == num_commands and all(rows[0] == tables[0][0] for rows in tables):
        runs = [[[str(n), *row] for row in rows[1:]] for n, rows in enumerate(tables, start=1)]
        tables = [[["run", *tables[0][0]], *itertools.chain(*runs)]]
    kept = [[any(cells) for cells in zip(*rows, strict=True)] for rows in tables]
    return [
        [list(itertools.compress(row, columns)) for row in rows]
        for rows, columns in zip(tables, kept, strict=True)
    ]


def summary(names: Sequence[str]) -> str:
    """Return one table with a row for each benchmark."""
    rows = []
    for name in names:
        entry, facts = ENTRIES[name], _of(name)
        mark = f" {STALE}" if is_stale(name) else ""
        commands = f"`{facts['commands'][0]}`"
        if len(facts["commands"]) > 1:
            commands += f" and {len(facts['commands']) - 1} more"
        told = entry.tells.format(**facts["figures"])
        rows.append(f"| {entry.what} | {told}{mark} | {about(facts)} | {commands} |")
    return "\n".join([f"| {' | '.join(SUMMARY)} |", "|" + "---|" * len(SUMMARY), *rows, ""])


def _of(name: str) -> dict[str, Any]:
    facts = stored(name)
    if facts is None:
        raise SystemExit(f"{name} stands in a page without benchmarks/figures/{name}.json: run it")
    return facts


def written(text: str) -> str:
    """Return a page with its marked tables written from the files."""
    text = FULL.sub(lambda match: f"{match[1]}\n{full(match[2])}\n\n{match[3]}", text)
    return SUMMED.sub(lambda match: match[1] + summary(match[2].split()), text)


def write() -> Iterator[str]:
    """Write the tables of all pages; yield the changed pages."""
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            path.write_text(new, encoding="utf-8")
            yield page


def main(words: Sequence[str] | None = None) -> int:
    """Run benchmarks one after the other, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENTRIES))
    for word, has in PEERS.items():
        parser.add_argument(
            f"--{word.lower()}", default="", metavar=word, help=f"python with {has}"
        )
    parser.add_argument("--write", action="store_true", help="run nothing, write the tables")
    args = parser.parse_args(words)
    if unknown := [name for name in args.names if name not in ENTRIES]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(ENTRIES)}")
    stale = sorted(filter(is_stale, ENTRIES), key=_minutes)
    names = [] if args.write else args.names or stale
    failed, pythons = [], {word: getattr(args, word.lower()) for word in PEERS}
    for name in names:
        if missing := [f"--{word.lower()}" for word in ENTRIES[name].needs if not pythons[word]]:
            print(f"{name}: left out, it needs {', '.join(missing)}", file=sys.stderr)
            continue
        print(f"{name}: {'; '.join(ENTRIES[name].commands)}", file=sys.stderr, flush=True)
        failed += [] if measure(name, pythons) else [name]
    print(*write(), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
