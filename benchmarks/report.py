"""Reports of benchmarks: medians with their range, tables, machine, versions, JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import mean, median
from typing import Any

LIBRARIES = ("torch", "transformers", "peft", "trl", "unsloth", "accelerate", "bitsandbytes")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median(values), min(values), max(values))

    def show(self, digits: int = 0) -> str:
        """Return "median (low-high)"."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def disagreement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the mean difference of two loss curves over the mean of the second.

    Raises:
        ValueError: Their numbers of steps differ.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"the loss curves have {len(ours)} and {len(theirs)} steps")
    return mean(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / mean(theirs)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, whose columns line up; all but the first are right-aligned."""
    widths = [max(len(row[n]) for row in (columns, *rows)) for n in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * width if n == 0 else "-" * (width - 1) + ":") for n, width in enumerate(widths)]
    return "\n".join([line(columns), line(rule), *map(line, rows)])


def versions() -> dict[str, str]:
    """Return the versions of the libraries that this process can import."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return the properties of the machine that figures depend on."""
    facts: dict[str, Any] = {"cpu": _cpu(), "cores": os.cpu_count()}
    facts["threads"] = os.environ.get("OMP_NUM_THREADS", "all")
    facts["load"] = round(os.getloadavg()[0], 1)
    try:
        asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        facts["gpu"] = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    except OSError:
        facts["gpu"] = ""
    return facts


def heading(of_versions: Mapping[str, Mapping[str, str]]) -> str:
    """Return lines with the machine and the libraries of a table."""
    facts = machine()
    gpu = f", {facts['gpu']}" if facts["gpu"] else ", no GPU"
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores ({facts['threads']} threads){gpu}; "
        f"load average {facts['load']} at the end"
    ]
    for name, found in of_versions.items():
        lines.append(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
    return "\n".join(lines)


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures with their command and machine; without a path, do nothing."""
    if path is None:
        return
    about = {"command": " ".join(sys.orig_argv[1:]), "machine": machine(), "versions": versions()}
    path.write_text(json.dumps(about | dict(figures), indent=1) + "\n", encoding="utf-8")


def _cpu() -> str:
    """Return the processor's name, and which fast products of bf16 it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    known = dict(line.split("\t", 1) for line in lines if "\t" in line)
    name = known.get("model name", platform.machine()).strip(" \t:")
    flags = set(known.get("flags", "").split())
    has = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]
    return f"{name} ({', '.join(has) or 'no fast bf16'})"
