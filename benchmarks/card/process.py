"""Run each part of benchmarks.card in a process with a time limit; collect the result files.

A part that fails, hangs or is killed leaves the lines that it had written, and ends alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

STATUS_WELL, STATUS_BAD = 0, 1
"""Exit codes of a part that ran to its end."""
LOG_LINES = 12
"""Lines of the log that a page shows if a part ends early."""


def command(arguments: Sequence[str], name: str, page: Path) -> list[str]:
    """Return the command of one part; of options that are given twice the last one counts."""
    own = ["--part", name, "--here", "--out", str(page)]
    return [sys.executable, "-m", "benchmarks.card", *arguments, *own]


def run_apart(words: Sequence[str], name: str, page: Path, seconds: float) -> tuple[str, bool]:
    """Run a part's command; return its page, and whether all of its results are good.

    Args:
        page: File that the process extends with each line; an older one is deleted.
        seconds: Time limit; afterwards all processes of the part are killed.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    page.unlink(missing_ok=True)
    log = page.with_suffix(".log")
    with log.open("wb") as errors:
        process = subprocess.Popen(words, stdout=2, stderr=errors, start_new_session=True)
        try:
            status = process.wait(timeout=seconds)
            problem = "" if status in (STATUS_WELL, STATUS_BAD) else _ending(status)
        except subprocess.TimeoutExpired:
            status, problem = STATUS_BAD, f"It was stopped after {seconds:.0f} s."
        finally:
            _end_group(process)
    text = page.read_text(encoding="utf-8").rstrip() if page.exists() else f"## {name}"
    if not (problem or page.exists()):
        problem = "It ended without a result."
    if not problem:
        return text, status == STATUS_WELL
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
    shown = "\n".join(["```", *last, "```"]) if last else ""
    return "\n\n".join(filter(None, (text, f"**{problem}**", shown))), False


def _ending(status: int) -> str:
    if status < 0:
        return f"It was killed by {signal.Signals(-status).name}."
    return f"It ended with exit code {status}."


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of a part's group, if there are any."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all have ended
        return
    process.wait()
