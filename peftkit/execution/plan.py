"""The execution plan: the code paths and batch limits of a run on a device.

Layers, losses and norms never inspect a tensor's device: the plan selects the code paths of each
kind of device. train/fitting.py decides which plan fits into memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from peftkit.figures import dtype_name
from peftkit.settings import TrainConfig

Activations = Literal["keep", "selective", "recompute", "offload"]
"""What a block keeps for its backward pass: everything; everything outside its feed-forward layer;
its input; its input, in main memory."""
Placement = Literal["device", "stream"]
"""Where blocks keep their packed weights: on the device, or streamed to it from main memory."""
Shard = Literal["none", "base", "offload"]
"""Whether the base is sharded over processes, and whether main memory holds the shards."""

CPU_TOKENS = 1280
"""train.tokens_per_batch: auto on a CPU, enough to keep a few cores busy."""
GPU_TOKENS = 16_384
"""train.tokens_per_batch: auto on a GPU, far more than keeps it busy. Longer steps are sorted by
length, to avoid padding short rows to the longest."""
TILE, MOST_TILES = 4096, 16
"""Minimum tokens per tile of a feed-forward layer, and maximum tiles per row. Smaller tiles leave
matrix products idle and unpack 4-bit weights too often."""
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 96 << 20, 512 << 20
"""Maximum bytes of a chunk of logits."""

ACTIVATIONS_IN_WORDS: Mapping[Activations, str] = {
    "keep": "all activations are kept",
    "selective": "activations of feed-forward layers are recomputed",
    "recompute": "activations are recomputed",
    "offload": "activations are recomputed from main memory",
}


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How a model processes the rows of a step.

    Attributes:
        device: Kind of device: cpu, cuda or mps.
        rows, tokens: Maximum of a micro-batch, padding included; a single row may have more
            tokens. None: no limit.
        compile: Whether blocks run compiled; None: undecided.
        record: Whether passes are captured as CUDA graphs where possible; see `records_passes`.
        dtype: Compute dtype of the base.
        num_recomputed: Number of the first blocks in this activation mode; the others are in the
            next faster one. None: all blocks.
        autocast: Mixed precision from the launcher: bf16, fp16 or "".
        group_layers: Whether LoRA layers with the same input are computed together.
        tiles: Whether recomputed feed-forward layers are computed in tiles for long rows. It saves
            memory, and repeats a product, 5 % of a step.
        keeps_copies: Whether a GPU keeps unpacked copies of packed weights, with the same bits, in
            memory that activations leave.
        busy_tokens: Tokens per micro-batch below which the device waits for Python. Recomputing
            activations, a third more work, is preferred to smaller micro-batches.
    """

    device: str = "cpu"
    num_processes: int = 1
    placement: Placement = "device"
    shard: Shard = "none"
    activations: Activations = "keep"
    num_recomputed: int | None = None
    rows: int = 1
    tokens: int | None = None
    compile: bool | None = None
    record: bool = False
    dtype: str = ""
    autocast: str = ""
    group_layers: bool = True
    tiles: bool = False
    keeps_copies: bool = False
    busy_tokens: int = 1

    @classmethod
    def for_model(cls, model: torch.nn.Module) -> ExecutionPlan:
        """Return the default plan for a loaded model's device and dtype, without limits."""
        device = next(model.parameters(), torch.empty(0)).device.type
        autocast = ""
        if device != "meta" and torch.is_autocast_enabled(device):
            autocast = "fp16" if torch.get_autocast_dtype(device) == torch.float16 else "bf16"
        dtype = dtype_name(compute_dtype(model))
        return cls(device=device, dtype=dtype, autocast=autocast)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    @property
    def is_sharded(self) -> bool:
        """Whether the base is sharded over the processes."""
        return self.shard != "none"

    @property
    def lora_grouped(self) -> bool:
        """Whether LoRA layers with the same input are computed together."""
        return self.group_layers and not self.is_sharded

    @property
    def fused_kernels(self) -> bool:
        """Whether norms, gated layers and rotary embeddings each run as one Triton kernel."""
        return self.device == "cuda" and self.lora_grouped

    @property
    def records_decoding(self) -> bool:
        """Whether a decoding step is captured as a CUDA graph."""
        return self.device == "cuda"

    @property
    def records_passes(self) -> bool:
        """Whether a micro-batch's forward and backward pass is captured as a CUDA graph.

        Passes that wait for other processes or main memory cannot be captured.
        """
        waits = self.placement == "stream" or self.is_sharded or self.activations == "offload"
        return self.record and self.device == "cuda" and not waits

    @property
    def chunk_bytes(self) -> int:
        """Maximum bytes of a chunk of logits."""
        return GPU_CHUNK_BYTES if self.on_gpu else CPU_CHUNK_BYTES

    @property
    def attention(self) -> Literal["grouped", "sdpa"]:
        """Attention of short rows: plain matrix products, or torch's SDPA.

        On a CPU in 16 bits, the backward pass of torch's flash attention takes twice as long.
        """
        in_16_bits = self.autocast or self.dtype in ("bfloat16", "float16")
        return "grouped" if in_16_bits and not self.on_gpu else "sdpa"

    @property
    def is_selective(self) -> bool:
        """Whether some blocks recompute only their feed-forward layers, in eager code."""
        return self.activations == "selective" or self.num_recomputed is not None

    def tile(self, length: int) -> int:
        """Return the tokens of a row per tile of a recomputed feed-forward layer."""
        if not self.tiles or length < 2 * TILE:
            return length
        return max(TILE, -(-length // MOST_TILES))

    @property
    def recomputing_keeps_unpacked(self) -> bool:
        """Whether a recomputed block keeps its weights unpacked for the backward pass.

        On CUDA, unpacking twice costs next to nothing.
        """
        return self.device != "cuda"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON, for `plan_from`."""
        return asdict(self)

    def describe(self) -> str:
        """Return the plan as a readable phrase."""
        parts = [f"{self.num_processes} x {self.device}" if self.num_processes > 1 else self.device]
        if self.dtype:
            parts.append(self.dtype + f" ({self.autocast} by autocast)" * bool(self.autocast))
        if self.placement == "stream":
            parts.append("blocks streamed from main memory")
        if self.is_sharded:
            where = ", shards in main memory" * (self.shard == "offload")
            parts.append(f"base sharded over processes{where}")
        parts.append(self.activations_in_words)
        tokens = "" if self.tokens is None else f" or {self.tokens:,} tokens"
        parts.append(f"up to {self.rows} rows{tokens} at once")
        if self.compile:
            parts.append("blocks compiled")
        if self.records_passes:
            parts.append("passes recorded as CUDA graphs")
        if self.keeps_copies:
            parts.append("packed weights unpacked once")
        return ", ".join(parts)

    @property
    def activations_in_words(self) -> str:
        """What happens to activations, and in how many blocks if not in all."""
        blocks = "" if self.num_recomputed is None else f" in {self.num_recomputed} blocks"
        return ACTIVATIONS_IN_WORDS[self.activations] + blocks

    def less_than(self, before: ExecutionPlan) -> str:
        """Describe the changes that save memory; "" if there are none."""
        changes = []
        if before.keeps_copies and not self.keeps_copies:
            changes.append("packed weights are unpacked for each product")
        if self.activations_in_words != before.activations_in_words:
            changes.append(f"{self.activations_in_words} (train.gradient_checkpointing)")
        if self.rows != before.rows:
            changes.append(f"{self.rows} rows at a time instead of {before.rows}")
        if self.tokens != before.tokens:
            changes.append(f"{self.tokens} tokens at a time instead of {before.tokens}")
        if self.records_passes != before.records_passes:
            changes.append("passes are not recorded as CUDA graphs (train.record)")
        return ", ".join(changes)


def plan_from(values: Mapping[str, Any]) -> ExecutionPlan:
    """Return the plan with the fields of `as_dict`; ignore fields of other versions."""
    names = {field.name for field in fields(ExecutionPlan)}
    return ExecutionPlan(**{name: value for name, value in values.items() if name in names})


def compute_dtype(model: Any) -> torch.dtype:
    """Return a base's compute dtype.

    transformers' `model.dtype` is the dtype of the first float parameter. If the embedding is
    packed, this parameter may be its scales or an adapter.
    """
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # two-tower models have none
        embedding = None
    packing = getattr(getattr(embedding, "base", embedding), "packing", None)
    if packing is not None:
        dtype: torch.dtype = packing.dtype
        return dtype
    first = next(model.parameters(), torch.empty(0))
    return getattr(model, "dtype", first.dtype)


def plan_of(
    train: TrainConfig,
    device: str,
    num_processes: int = 1,
    *,
    placement: Placement = "device",
    shard: Shard | None = None,
    dtype: str = "",
    autocast: str = "",
) -> ExecutionPlan:
    """Return the plan that `train` requests, before it is fitted to the memory.

    Args:
        device: Kind of device.
        shard: By default `train.shard`; auto: none, until `place_weights` decides.
    """
    tokens = train.tokens_per_batch
    if tokens == "auto":
        tokens = CPU_TOKENS if device == "cpu" else GPU_TOKENS
    return ExecutionPlan(
        device=device,
        num_processes=num_processes,
        placement=placement,
        shard=shard or ("none" if train.shard == "auto" else train.shard),
        rows=train.batch_size,
        tokens=tokens,
        compile=None if train.compile == "auto" else train.compile,
        record=train.record,
        dtype=dtype,
        autocast=autocast,
        group_layers=train.group_layers,
    )


def activation_modes(
    requested: bool | Literal["auto"],
    *,
    on_gpu: bool,
    has_blocks: bool = True,
    streamed: bool = False,
    recomputes: bool = False,
    selective: bool = False,
) -> tuple[Activations, ...]:
    """Return the activation modes to try, fastest first.

    Args:
        requested: train.gradient_checkpointing.
        has_blocks: Whether the model has blocks that can be recomputed.
        streamed: Whether weights are streamed; kept activations would hold all of them in memory.
        recomputes: Whether the model already recomputes its blocks.
        selective: Whether feed-forward layers can be recomputed alone.
    """
    less: tuple[Activations, ...] = ("recompute", "offload") if on_gpu else ("recompute",)
    if streamed or requested is True or (requested == "auto" and recomputes):
        return less
    if requested is False or not has_blocks:
        return ("keep",)
    return ("keep", "selective", *less) if selective else ("keep", *less)
