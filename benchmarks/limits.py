"""The machine's limits: the rate of matrix products, and the memory bandwidth.

They are measured in the same run as the speeds, because shared machines change from hour to hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SECONDS = 1.0
"""Seconds for measuring one limit; the best of all tries counts."""
SIDE = {"cpu": 2048, "cuda": 8192}
"""Size of the square matrices of a product."""
READ_BYTES = 1 << 28
"""Size of the matrix that is multiplied with one row: larger than the caches."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Limits:
    """FLOP/s of products by dtype, and bytes/s that a product of one row reads."""

    bf16: float
    fp32: float
    read: float

    def best(self, other: Limits) -> Limits:
        """Return the higher value of each limit."""
        return Limits(
            max(self.bf16, other.bf16), max(self.fp32, other.fp32), max(self.read, other.read)
        )

    def show(self) -> str:
        """Return them as a sentence."""
        return (
            f"products: bf16 {self.bf16 / 1e9:,.0f}, fp32 {self.fp32 / 1e9:,.0f} GFLOP/s; "
            f"reading {self.read / 1e9:,.1f} GB/s"
        )


def limits(device: str = "cpu", *, seconds: float = SECONDS) -> Limits:
    """Measure the limits of a device, with as many threads as torch has."""
    kind = torch.device(device).type
    side = SIDE.get(kind, SIDE["cpu"])

    def product_rate(dtype: torch.dtype) -> float:
        square = torch.ones(side, side, dtype=dtype, device=device)
        return 2 * side**3 / _best(lambda: square @ square, kind, seconds)

    columns = 4096
    wide = torch.ones(READ_BYTES // (4 * columns), columns, device=device)
    row = torch.ones(columns, device=device)
    read = wide.nbytes / _best(lambda: torch.mv(wide, row), kind, seconds)
    return Limits(product_rate(torch.bfloat16), product_rate(torch.float32), read)


def _best(run: Callable[[], Any], kind: str, seconds: float) -> float:
    """Return the least seconds of a call, after a first call that creates its kernel."""
    wait = torch.cuda.synchronize if kind == "cuda" else lambda: None
    run()
    best, until = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < until:
        wait()
        began = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that determine the products of a causal model.

    Attributes:
        blocks, head: Values of the linear layers of the blocks, and of the head.
        adapter: Values of LoRA on all linear layers of the blocks.
        attention: FLOP of a forward pass for each pair of tokens that attend.
    """

    blocks: int
    head: int
    adapter: int
    attention: int

    @classmethod
    def of(cls, model: nn.Module, rank: int, num_layers: int | None = None) -> Sizes:
        """Count a model of transformers, or its first blocks."""
        config: Any = model.config
        share = (num_layers or config.num_hidden_layers) / config.num_hidden_layers
        head = model.get_output_embeddings()
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(
            round(share * sum(m.weight.numel() for m in linears)),
            head.weight.numel(),
            round(share * rank * sum(m.in_features + m.out_features for m in linears)),
            4 * width * (num_layers or config.num_hidden_layers),
        )

    def step_flop(self, lengths: Sequence[int], num_tokens: int, num_learnt: int) -> float:
        """Return the FLOP of LoRA steps over rows: 4N + 3.5a + 6P, the head on target tokens only.

        Args:
            lengths: Tokens of each row.
            num_tokens: Tokens of all rows; shared prefixes of a batch count once.
            num_learnt: Target tokens.
        """
        attention = self.attention * sum(length**2 for length in lengths) / 2
        tokens = (4 * self.blocks + 6 * self.adapter) * num_tokens
        return tokens + 4 * self.head * num_learnt + 3.5 * attention

    def prefill_flop(self, lengths: Sequence[int], num_tokens: int | None = None) -> float:
        """Return the FLOP of reading prompts with base and adapter.

        Args:
            lengths: Tokens of each.
            num_tokens: Tokens of all prompts, shared prefixes counted once; None: nothing is
                shared.
        """
        attention = self.attention * sum(length**2 for length in lengths) / 2
        number = sum(lengths) if num_tokens is None else num_tokens
        tokens = 2 * (self.blocks + self.adapter) * number
        return tokens + 2 * self.head * len(lengths) + attention

    def decode_bytes(self, itemsize: int) -> int:
        """Return the bytes of weights that a new token of one answer reads; adapters in fp32."""
        return (self.blocks + self.head) * itemsize + 4 * self.adapter

    def answer_seconds(
        self, prompts: Sequence[int], num_new: float, rows: float, best: Limits, dtype: str
    ) -> float:
        """Return the seconds that completions take at the machine's limits.

        A decoding step reads all weights once or multiplies them with its rows, whichever takes
        longer.

        Args:
            prompts: Tokens of each.
            num_new: Tokens of all completions.
            rows: Concurrent completions.
            dtype: "bf16" or "fp32", of the base.
        """
        products = getattr(best, dtype)
        flop = 2 * (self.blocks + self.adapter + self.head) * rows
        step = max(self.decode_bytes(DTYPES[dtype].itemsize) / best.read, flop / products)
        return self.prefill_flop(prompts) / products + step * num_new / rows
