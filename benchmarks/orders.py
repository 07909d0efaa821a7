"""Training rows of benchmarks: the quickstart's orders, generated from a seed."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

from tests.helpers.folders import write_rows

QUICKSTART = Path(__file__).parent.parent / "recipes" / "examples" / "quickstart.py"
MEAN_SENTENCES = 9
LONGEST = 45


def make_rows(folder: Path, number: int | None = None, kind: str = "orders") -> Path:
    """Write training rows and return their file.

    Args:
        number: How many; by default as many as the quickstart has.
        kind: "orders": a sentence becomes JSON, rows of about 100 tokens; "mixed": answers of one
            sentence to a page, spread as those to people's instructions are.
    """
    quickstart = runpy.run_path(str(QUICKSTART))
    rng = random.Random(0)
    number = quickstart["NUM_TRAIN"] if number is None else number
    make = {"orders": quickstart["make_order"], "mixed": _conversation}[kind]
    rows = [make(rng, quickstart) if kind == "mixed" else make(rng) for _ in range(number)]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{kind}.jsonl"
    write_rows(file, rows)
    return file


def _conversation(rng: random.Random, quickstart: dict[str, Any]) -> dict[str, str]:
    """Return a row whose completion is a random number of orders."""
    count = min(LONGEST, 1 + int(rng.expovariate(1 / MEAN_SENTENCES)))
    sentences = [quickstart["make_order"](rng)["instruction"] for _ in range(count)]
    asked = f"Write down what {count} people said when they ordered from {sentences[0].split()[-2]}"
    return {"instruction": asked, "input": "", "output": " ".join(sentences)}
