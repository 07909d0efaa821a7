"""Streamed blocks on paper: bytes moved in a micro-step; from how many tokens on that is hidden.

    python -m benchmarks.streaming

A recomputed step reads each block's packed weights twice (base.placement: stream), less the last
block, which stays. Its arithmetic is 6 FLOP for each weight of the blocks that a token meets:
forward, again, and the gradient of the input. Nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report import table

BITS = 4.127
"""Of a weight in nf4 with double quantisation."""
LINKS = (8, 16, 25)
"""GB/s from main memory to a card: PCIe 3.0 x16 unpinned, 4.0 x16, 5.0 x16, about."""


@dataclass(frozen=True, slots=True)
class Large:
    """A base, its card, and what the card reaches of its peak.

    Attributes:
        weights: Of all blocks. active: Of those that a token meets. layers: Blocks.
        tflops: Of the card, as steps reach it.
    """

    name: str
    card: str
    weights: float
    active: float
    layers: int
    tflops: float


BASES = (
    Large("Llama-3-70B", "12 GB, 25 TFLOP/s", 68.45e9, 68.45e9, 80, 25),
    Large("Llama-3-70B", "24 GB, 100 TFLOP/s", 68.45e9, 68.45e9, 80, 100),
    Large("Llama-3.1-8B", "6 GB, 25 TFLOP/s", 6.98e9, 6.98e9, 32, 25),
    Large("Qwen3-30B-A3B", "8 GB, 25 TFLOP/s", 29.9e9, 2.7e9, 48, 25),
)


def main() -> None:
    """Print a row for each base and card."""
    rows = []
    for base in BASES:
        packed = base.weights * BITS / 8
        moved = packed * (2 - 1 / base.layers)
        sizes = (2 * packed / base.layers, moved)
        cells = [base.name, base.card, *(f"{size / 1e9:.2f}" for size in sizes)]
        for link in LINKS:
            seconds = moved / (link * 1e9)
            tokens = seconds * base.tflops * 1e12 / (6 * base.active)
            cells.append(f"{seconds:.1f} s; {tokens:,.0f}")
        rows.append(cells)
    links = [f"at {link} GB/s; hidden from tokens" for link in LINKS]
    print(table(["base", "card", "two blocks GB", "moved GB", *links], rows))


if __name__ == "__main__":
    main()
