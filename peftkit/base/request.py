"""A base to load, and the placement of its weights.

`place_weights` decides by size, before weights are read: for loading, runs and `peftkit plan`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peftkit.base.locate import Location
from peftkit.base.pretrained import config_for, pad_within
from peftkit.base.purpose import Purpose
from peftkit.events import Listener, ignore
from peftkit.execution.plan import Placement, Shard
from peftkit.figures import size
from peftkit.kernels.device import gpu_of
from peftkit.settings import BaseConfig

CPUINFO = Path("/proc/cpuinfo")
WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA that disable oneDNN's bf16 instructions."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HALF = 0.5
"""Share of free memory below which weights stay on the device without an estimate of a step."""
ROOM = 0.8
"""Maximum share of free memory for weights, without an estimate of a training step."""


@dataclass(frozen=True, slots=True)
class BaseRequest:
    """A base to load.

    Attributes:
        settings: The recipe's `base:` section.
        purpose: Its model class, inputs and head; the head's words are single tokens.
        location: The files to read.
        config: The transformers config, with the head and the positions of `purpose`.
        dtype: The dtype of computation and of weights that are not packed.
        device: The device that keeps the weights, and packs them by default.
        packs_on: Another device that packs them one at a time: the GPU of a streamed base.
    """

    settings: BaseConfig
    purpose: Purpose
    location: Location
    config: Any
    dtype: torch.dtype
    device: torch.device
    packs_on: torch.device | None = None

    def with_tokens_of(self, tokenizer: Any, on_event: Listener = ignore) -> BaseRequest:
        """Complete a head that reads the last token of a row, or is initialised from words.

        A pad token without a row in the embedding is replaced; padding is masked anyway.

        Raises:
            BaseError: A word is not a single token.
        """
        head, text = self.purpose.head, self.config.get_text_config()
        rows = getattr(text, "vocab_size", None)
        if tokenizer is not None and rows:
            pad_within(tokenizer, rows, on_event)
        if rows and (getattr(text, "pad_token_id", None) or 0) >= rows:
            text.pad_token_id = None if tokenizer is None else tokenizer.pad_token_id
        if head is None:
            return self
        if tokenizer is not None and getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = tokenizer.pad_token_id
        return replace(self, purpose=replace(self.purpose, head=head.with_tokens(tokenizer)))


def request_of(
    settings: BaseConfig,
    purpose: Purpose,
    location: Location,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> BaseRequest:
    """Read a base's config.

    Args:
        dtype: By default `compute_dtype`.

    Raises:
        BaseError: The config is missing, damaged, or describes a model for another purpose.
    """
    if settings.rope_scaling:
        purpose = replace(purpose, rope_scaling=settings.rope_scaling)
    config = config_for(location, purpose)
    dtype = dtype or compute_dtype(settings, device)
    return BaseRequest(settings, purpose, location, config, dtype, device)


def compute_dtype(settings: BaseConfig, device: torch.device) -> torch.dtype:
    """Return `base.dtype`; auto: the dtype with a device's fastest matrix products."""
    return DTYPES.get(settings.dtype) or fast_dtype(device)


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype with a device's fastest matrix products: bf16, or the closest to it."""
    if (gpu := gpu_of(device)) is not None:
        return gpu.fast_dtype()
    # on CPUs without bf16 instructions, bf16 is slower than fp32
    return torch.bfloat16 if device.type == "cpu" and has_bf16_units() else torch.float32


def has_bf16_units() -> bool:
    """Return whether the CPU has bf16 instructions and ONEDNN_MAX_CPU_ISA allows them."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in WITHOUT_BF16:
        return False
    flags = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def fits_device(weights: int, free: int, step_fits: Callable[[], bool] | None = None) -> bool:
    """Return whether a base stays whole on its device.

    Weights below half of the free memory stay; weights larger than the free memory do not. In
    between, the smallest training step decides.

    Args:
        weights, free: Bytes of the stored weights and of the device's free memory.
        step_fits: Estimates that step; None: nothing is trained.
    """
    if weights <= HALF * free:
        return True
    if weights > free:
        return False
    return weights <= ROOM * free if step_fits is None else step_fits()


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """Where a base's weights go.

    Attributes:
        fits: False if neither the device nor an allowed alternative has room for the base.
        notice: The reason for leaving the device, with the sizes; "" if the base stays on it.
    """

    placement: Placement = "device"
    shard: Shard = "none"
    fits: bool = True
    notice: str = ""


def place_weights(
    weights: int,
    free: int,
    *,
    can_stream: Callable[[], bool],
    can_shard: bool = False,
    step_fits: Callable[[Shard], bool] | None = None,
    agree: Callable[[bool], bool] = bool,
) -> WeightPlacement:
    """Return where a base's weights go: on the device, sharded, or streamed, in this order.

    Args:
        weights, free: Bytes of the stored weights and of the device's free memory.
        can_stream, can_shard: Whether the recipe and the base allow the alternatives.
        step_fits: Whether the smallest training step fits; None: nothing is trained.
        agree: Returns whether a condition holds on all processes; each of them calls it.
    """
    count_step = None if step_fits is None else lambda: step_fits("none")
    if agree(fits_device(weights, free, count_step)):
        return WeightPlacement()
    sizes = f"The base takes {size(weights, 2)}; {size(free, 2)} are free."
    if step_fits is not None and weights <= free:
        sizes += " A training step of one row does not fit with it."
    if can_shard and step_fits is not None:
        in_memory = agree(step_fits("base"))
        where = "" if in_memory else ", offloaded to main memory"
        notice = f"The base is sharded over the processes{where} (train.shard: auto). {sizes}"
        return WeightPlacement(shard="base" if in_memory else "offload", notice=notice)
    if can_stream():
        notice = "The base's blocks are streamed from main memory (base.placement: auto)."
        return WeightPlacement("stream", notice=f"{notice} {sizes}")
    return WeightPlacement(fits=False, notice=sizes)
