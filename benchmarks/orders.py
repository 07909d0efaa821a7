"""The rows that benchmarks learn from: the quickstart's orders, made anew with each seed."""

from __future__ import annotations

import runpy
from pathlib import Path

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart.py"


def make_rows(folder: Path) -> Path:
    """Write the training rows and return their file."""
    train, _ = runpy.run_path(str(QUICKSTART))["make_data"](folder)
    return Path(train)
