"""The report of runs as files: HTML, or a PNG of the same pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peftkit.report.history import read_history, shorten_names
from peftkit.report.page import page


def write_report(runs: Sequence[str | Path], out: str | Path, *, png: bool = False) -> Path:
    """Write the report of runs as one file, and return its path.

    Args:
        runs: Their folders; the recipes of several are compared.
        out: The file to write.
        png: Write the pictures alone, as a PNG.

    Raises:
        DataError: A folder holds no run.
        ConfigError: A PNG is asked for, and Pillow is not installed.
        OutputError, RunError: The file cannot be written.
    """
    from peftkit.files.disk import write_bytes_atomic, write_text  # torch comes with it

    histories = [read_history(run) for run in runs]
    if len(histories) > 1:
        shorten_names(histories)
    path = Path(out)
    if png:
        from peftkit.report.png import picture

        write_bytes_atomic(picture(histories), path)
    else:
        write_text(page(histories), path)
    return path
