"""How a run is carried out: decided once, handed down to whatever computes.

Layers, losses and norms ask neither a tensor nor themselves where they are: what a kind of device
is good at stands here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch

Activations = Literal["keep", "recompute", "offload"]
"""What is kept: all that a block computes; its input; its input, in main memory."""
Placement = Literal["device", "stream"]
"""Where the packed weights of blocks are: on the device, or in main memory, streamed to it."""
Shard = Literal["none", "base", "offload"]
"""Whether the base is spread over processes, and its parts wait in main memory besides."""

CPU_TOKENS = 1280
"""Matrix products of so many rows keep a few cores busy; more only take more memory."""
GPU_TOKENS = 16_384
"""Far more rows of a product than a GPU needs to be busy; rows are sorted by length where there are
more, so that short ones do not pay for the padding of the longest."""
BUSY_TOKENS = {"cuda": 4096}
"""Tokens at once that a device needs to be busy. With fewer a GPU waits for Python: activations are
rather recomputed, a third more work, than rows be cut into less than this."""
TILE, MOST_TILES = 4096, 16
"""Tokens of a feed-forward layer at a time, at least: fewer leave matrix products idle, and unpack
4-bit weights too often; and how many tiles a row has at most."""
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 96 << 20, 512 << 20
"""Of the logits that are there at once."""

ACTIVATIONS_IN_WORDS: Mapping[Activations, str] = {
    "keep": "all activations are kept",
    "recompute": "activations are recomputed",
    "offload": "activations are recomputed from main memory",
}


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How the rows of a step go through a model.

    Attributes:
        device: Its kind: cpu, cuda or mps.
        num_processes: Of the run.
        context_parallel: Processes that each sequence is split across.
        rows, tokens: At most so many go through the model at once, padding included; one row alone
            may have more tokens. None: no limit.
        compile: Whether blocks run compiled; None before that is decided.
        dtype: What the base computes in.
        autocast: bf16 or fp16, where the launcher was told so.
        group_layers: Whether layers that read one input are computed together.
    """

    device: str = "cpu"
    num_processes: int = 1
    placement: Placement = "device"
    shard: Shard = "none"
    context_parallel: int = 1
    activations: Activations = "keep"
    rows: int = 1
    tokens: int | None = None
    compile: bool | None = None
    dtype: str = ""
    autocast: str = ""
    group_layers: bool = True

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    @property
    def is_sharded(self) -> bool:
        """Whether the base is spread over the processes."""
        return self.shard != "none"

    @property
    def lora_grouped(self) -> bool:
        """Whether LoRA layers of one input are computed together."""
        return self.group_layers and not self.is_sharded

    @property
    def fused_kernels(self) -> bool:
        """Whether norms, gated layers and rotations are one kernel each, which CUDA alone has."""
        return self.device == "cuda" and self.lora_grouped

    @property
    def records_decoding(self) -> bool:
        """Whether a step of decoding is recorded, and launched as one graph, which CUDA can."""
        return self.device == "cuda"

    @property
    def chunk_bytes(self) -> int:
        """How much of the logits is there at once."""
        return GPU_CHUNK_BYTES if self.on_gpu else CPU_CHUNK_BYTES

    @property
    def attention(self) -> Literal["grouped", "sdpa"]:
        """What computes the attention of short rows: plain products, or torch's SDPA.

        On a CPU the backward pass of torch's flash attention takes twice as long in 16 bits.
        """
        in_16_bits = self.autocast or self.dtype in ("bfloat16", "float16")
        return "grouped" if in_16_bits and not self.on_gpu else "sdpa"

    def tile(self, length: int) -> int:
        """Return how many tokens of a row recomputed feed-forward layers take at once."""
        if length < 2 * TILE:  # a tile's last product is made once more, 5 % of a step
            return length
        return max(TILE, -(-length // MOST_TILES))

    @property
    def recomputing_keeps_unpacked(self) -> bool:
        """Whether a recomputed block keeps its weights unpacked for the backward pass.

        CUDA unpacks them once more in next to no time.
        """
        return self.device != "cuda"

    @property
    def busy_tokens(self) -> int:
        """Tokens at once below which the device idles."""
        return BUSY_TOKENS.get(self.device, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; `plan_from` reads them."""
        return asdict(self)

    def describe(self) -> str:
        """Return the plan in plain words."""
        parts = [f"{self.num_processes} x {self.device}" if self.num_processes > 1 else self.device]
        if self.dtype:
            parts.append(self.dtype + f" ({self.autocast} by autocast)" * bool(self.autocast))
        if self.placement == "stream":
            parts.append("blocks streamed from main memory")
        if self.is_sharded:
            where = ", parts in main memory" * (self.shard == "offload")
            parts.append(f"base spread over processes{where}")
        if self.context_parallel > 1:
            parts.append(f"each row on {self.context_parallel} processes")
        parts.append(ACTIVATIONS_IN_WORDS[self.activations])
        tokens = "" if self.tokens is None else f" or {self.tokens:,} tokens"
        parts.append(f"up to {self.rows} rows{tokens} at once")
        if self.compile:
            parts.append("blocks compiled")
        return ", ".join(parts)

    def less_than(self, before: ExecutionPlan) -> str:
        """Say what takes less memory than before, if anything."""
        how = []
        if self.activations != before.activations:
            where = ", from main memory" * (self.activations == "offload")
            how.append(f"activations are recomputed{where} (train.gradient_checkpointing)")
        if self.rows != before.rows:
            how.append(f"{self.rows} rows at a time instead of {before.rows}")
        if self.tokens != before.tokens:
            how.append(f"{self.tokens} tokens at a time instead of {before.tokens}")
        return ", ".join(how)


def plan_from(values: Mapping[str, Any]) -> ExecutionPlan:
    """Return a plan that `as_dict` gave; what a later version added is left out."""
    known = {field.name for field in fields(ExecutionPlan)}
    return ExecutionPlan(**{name: value for name, value in values.items() if name in known})


def plan_for(device: torch.device | str) -> ExecutionPlan:
    """Return what a kind of device does best, where nothing else is decided."""
    kind = torch.device(device).type
    autocast = ""
    if kind != "meta" and torch.is_autocast_enabled(kind):
        autocast = "fp16" if torch.get_autocast_dtype(kind) == torch.float16 else "bf16"
    return ExecutionPlan(device=kind, autocast=autocast)


def plan_of(model: torch.nn.Module) -> ExecutionPlan:
    """Return `plan_for` the device that a model is on, in its dtype."""
    first = next(model.parameters(), torch.empty(0))
    dtype = str(getattr(model, "dtype", first.dtype)).removeprefix("torch.")
    return replace(plan_for(first.device), dtype=dtype)


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's first parameter, the CPU where it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def tokens_at_once(asked: int | Literal["auto"] | None, device: str) -> int | None:
    """Return train.tokens_per_batch as a number, for a kind of device."""
    if asked != "auto":
        return asked
    return CPU_TOKENS if device == "cpu" else GPU_TOKENS
