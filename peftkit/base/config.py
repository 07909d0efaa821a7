"""What a recipe's `base:` section holds."""

from __future__ import annotations

from typing import Any, Literal

from peftkit.config.schema import Config


class BaseConfig(Config):
    """Which base model, and how it is held in memory."""

    model: str
    """Folder, GGUF file, hub id, or a short name (smollm2-135m, all-minilm-l6-v2)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype of the computation and of weights that are not quantised; auto: the fastest here."""
    quantize: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Keep the weights of linear layers in 4 or 8 bits. none: as the files have them, which may be
    quantised already (AWQ, GPTQ, compressed-tensors, FP8 and others keep their bits)."""
    double_quant: bool = True
    """Quantise the scales of nf4 and fp4 as well: 4.1 bits for a weight instead of 4.5."""
    quantize_embeddings: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Keep the embedding of tokens and the output layer in 4 or 8 bits too (with quantize): of 8B
    in nf4 they are a third of what is left. Where both are one tensor it stays one."""
    quantize_towers: bool = False
    """Quantise the towers for images and sound and their projectors too; by default only the
    language side of such a model is, and these stay in 16 bits."""
    placement: Literal["auto", "device", "stream"] = "auto"
    """Where the quantised weights of blocks stay: on the device, or in main memory, from where two
    blocks at a time are streamed to it. auto: streamed if a quantised base does not fit a GPU."""
    store: Literal["auto", "off"] = "auto"
    """auto: a large base that was quantised once is kept in the cache (PEFTKIT_CACHE) and opened in
    seconds; see peftkit base ls. off: it is quantised at each start."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary positions for longer rows than the base was made for, as transformers'
    rope_parameters: {rope_type: yarn, factor: 4.0}. Kept with the adapter and in merged models."""
    new_tokens: tuple[str, ...] = ()
    """Tokens to add; their rows in the embedding and the head are trained too."""
