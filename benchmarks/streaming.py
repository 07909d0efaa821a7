"""Planned training of bases larger than a card: streamed to one card, or sharded.

    python -m benchmarks.streaming
    python -m benchmarks.streaming --cards

Figures of `peftkit plan` for a step: LoRA of rank 16 on all linears (in mixtures of experts on
attention), nf4, one row, blocks recomputed. Nothing is measured. "hidden from": tokens of a row
above which computing takes longer than the copies to the card, at 40 % of its bf16 peak.
"""

from __future__ import annotations

import argparse
from typing import Any

import transformers

from benchmarks import shapes
from benchmarks.report import table
from peftkit.config.schema import from_dict
from peftkit.execution.environment import gpu_of_size
from peftkit.planning.memory import CARDS, MemoryEstimator
from peftkit.recipe import Recipe

LINKS = (8.0, 16.0, 25.0)
"""GB/s from main memory to a card: PCIe 3.0 x16 unpinned, 4.0 x16, 5.0 x16, about."""
STREAMED = (
    ("llama-3-70b", 12, 2048),
    ("llama-3-70b", 24, 4096),
    ("llama-3.1-8b", 6, 2048),
    ("qwen3-30b-a3b", 8, 2048),
)
"""A base, GB of a card, tokens of the row."""
SPREAD = (("llama-3-70b", 2, 24, 2048), ("llama-3-70b", 8, 24, 8192), ("llama-3.1-8b", 2, 8, 2048))
"""A base, cards, GB of each, tokens of a row on each."""


def config_of(name: str) -> Any:
    """Return the config of a base."""
    if name in shapes.SHAPES:
        return shapes.SHAPES[name].make_config(max_position_embeddings=1 << 17)
    return transformers.Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        max_position_embeddings=1 << 15,
    )


def costs_of(name: str, gigabytes: int, length: int, **train: str) -> MemoryEstimator:
    """Return the costs of training a base on a card; in mixtures only attention is adapted."""
    mixture = name not in shapes.SHAPES
    recipe = {
        "base": {"model": name, "quantize": "nf4"},
        "method": {"type": "lora", "targets": ["q", "k", "v", "o"] if mixture else "all-linear"},
        "data": {"train": "", "max_length": length},
        "train": {"batch_size": 1, "gradient_checkpointing": True, **train},
    }
    machine = gpu_of_size(gigabytes * 10**9)
    return MemoryEstimator(from_dict(Recipe, recipe, name), config_of(name), machine)


def streamed() -> str:
    """Return a table of bases whose blocks are streamed."""
    rows = []
    for name, gigabytes, length in STREAMED:
        costs = costs_of(name, gigabytes, length)
        way = costs.strategy("stream", "offload")
        cells = [name, f"{gigabytes} GB", f"{length:,}", f"{way.peak_bytes / 1e9:.2f}"]
        cells += [f"{way.longest_row:,}", f"{way.moved_bytes / 1e9:.2f}"]
        for link in LINKS:
            costs.link = link
            seconds, hidden = way.moved_bytes / (link * 1e9), costs.strategy("stream", "offload")
            cells.append(f"{seconds:.1f} s; {hidden.compute_bound_tokens:,}")
        rows.append([*cells, costs.card.name])
    links = [f"at {link:g} GB/s; hidden from" for link in LINKS]
    columns = ["base", "card", "tokens", "peak GB", "longest row", "moved GB", *links, "as"]
    return table(columns, rows)


def spread() -> str:
    """Return a table of bases that are sharded over cards."""
    rows = []
    for name, cards, gigabytes, length in SPREAD:
        for how in ("base", "offload"):
            for optimizer in ("adamw", "adamw_8bit"):
                share = costs_of(name, gigabytes, length, shard=how, optimizer=optimizer).share(
                    cards
                )
                kept = share.by_category
                cells = [name, f"{cards} x {gigabytes} GB", f"{length:,}", how, optimizer]
                cells += [f"{kept['weights'] / 1e9:.2f}", f"{share.peak_bytes / 1e9:.2f}"]
                cells += ["yes" if share.fits else "no", f"{share.longest_row:,}"]
                cells += [f"{share.wire_bytes / 1e9:.1f}"]
                rows.append(
                    [*cells, *(f"{tokens:,}" for tokens in share.compute_bound_tokens.values())]
                )
    columns = ["base", "cards", "tokens", "shard", "optimizer", "weights GB", "peak GB", "fits"]
    return table([*columns, "longest row", "wire GB", "hidden from at 25 GB/s", "at 3 GB/s"], rows)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", action="store_true", help="spread over several cards")
    print(spread() if parser.parse_args().cards else streamed())
    print("Cards: " + ", ".join(f"{c.name} {c.tflops:g} TFLOP/s" for c in CARDS))


if __name__ == "__main__":
    main()
