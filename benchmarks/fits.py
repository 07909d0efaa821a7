"""Planned training of models on cards: the longest row, and the memory of streamed weights.

    python -m benchmarks.fits
    python -m benchmarks.fits --models llama-3.1-8b --cards 8,24 --quantize int8

LoRA of rank 16 on all linears, fp32 Adam, one row at a time. For each model and card: the longest
row in any activation mode, with the packed base on the card and with its blocks streamed from main
memory, and in parentheses the GB of main memory that this row takes; "no" if a row of `--tokens`
does not fit. Nothing is trained: a step of a few blocks is
counted without data, for rows of `--tokens` and longer rows, at least up to a quarter of the
longest (`REACH` in `peftkit/planning/memory.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import shapes
from benchmarks.report import table
from peftkit.config.schema import from_dict
from peftkit.execution.environment import gpu_of_size
from peftkit.execution.plan import Placement
from peftkit.planning.memory import MemoryEstimator, Strategy
from peftkit.recipe import Recipe

MODELS = ("llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3-70b")
CARDS = (6, 8, 12, 16, 24, 48, 80)
GB = 10**9
PLACES: dict[Placement, str] = {"device": "", "stream": ", streamed"}
"""Placement of the base, and its name in the table."""


def recipe_of(model: str, quantize: str, tokens: int, embeddings: str) -> Recipe:
    """Return a recipe that trains a model on rows of this many tokens, one at a time."""
    asked = {
        "base": {"model": model, "quantize": quantize, "quantize_embeddings": embeddings},
        "method": {"type": "lora", "rank": 16},
        "data": {"train": "", "max_length": tokens},
        "train": {"batch_size": 1},
    }
    return from_dict(Recipe, asked, "benchmarks.fits")


def way_on(recipe: Recipe, card: int, placement: Placement) -> Strategy | None:
    """Return the activation mode with the longest row on a card; None if that row is too short."""
    config = shapes.SHAPES[recipe.base.model].make_config()
    estimator = MemoryEstimator(recipe, config, gpu_of_size(card * GB))
    best = max(estimator.placed(placement), key=lambda way: way.longest_row)
    return best if best.longest_row >= estimator.length else None


def rows_of(
    models: Sequence[str],
    cards: Sequence[int],
    quantize: str,
    tokens: int,
    embeddings: str = "none",
) -> list[list[str]]:
    """Return two rows of the table for each model: the longest row on each card."""
    table_rows = []
    for model in models:
        recipe = recipe_of(model, quantize, tokens, embeddings)
        for placement, name in PLACES.items():
            ways = [way_on(recipe, card, placement) for card in cards]
            cells = ["no" if way is None else f"{way.longest_row:,}" for way in ways]
            waits = [None if way is None else way.host_bytes_of(way.longest_row) for way in ways]
            main = ["" if num_bytes is None else f"{num_bytes / GB:.1f}" for num_bytes in waits]
            table_rows.append([f"{model}{name}", *cells])
            table_rows.append(["main memory, GB", *main])
    return table_rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cards", default=",".join(map(str, CARDS)), help="GB")
    parser.add_argument("--quantize", default="nf4", choices=["none", "nf4", "fp4", "int8"])
    parser.add_argument("--embeddings", default="none", choices=["none", "nf4", "fp4", "int8"])
    parser.add_argument("--tokens", type=int, default=1024, help="that a row has at least")
    asked = parser.parse_args()
    cards = [int(card) for card in asked.cards.split(",")]
    print(f"Longest row in tokens, {asked.quantize}, where one of {asked.tokens:,} fits:\n")
    columns = ["model", *(f"{card} GB" for card in cards)]
    models, how = asked.models.split(","), (asked.quantize, asked.tokens, asked.embeddings)
    print(table(columns, rows_of(models, cards, *how)))


if __name__ == "__main__":
    main()
