"""A base to load: its settings, and what follows from its files and from this machine.

Where its weights go is decided by their size before any of them is read, for loading, for a run and
for `peftkit plan` alike: `fits_device`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peftkit.base.locate import Location
from peftkit.base.pretrained import check_config, is_packed
from peftkit.base.purpose import Purpose
from peftkit.base.skeleton import weight_bytes
from peftkit.errors import BaseError
from peftkit.execution.environment import free_now
from peftkit.kernels.device import gpu_of
from peftkit.settings import BaseConfig

CPUINFO = Path("/proc/cpuinfo")
WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA, the instructions that oneDNN may use at most, without bf16."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HALF = 0.5
"""Share of the free memory below which weights are on the device and nothing is counted."""
ROOM = 0.8
"""Share of the free memory that weights may take where no training step can be counted."""
STREAMED = "The base's blocks are streamed from main memory (base.placement: auto)."


@dataclass(frozen=True, slots=True)
class BaseRequest:
    """A base to load.

    Attributes:
        settings: The recipe's `base:` section.
        purpose: Its head's words have their tokens.
        location: The files that it is read from.
        config: The config of transformers, with the head and the positions of `purpose`.
        dtype: The dtype of computation and of weights that are not packed.
        device: The device on which weights are packed and stay.
    """

    settings: BaseConfig
    purpose: Purpose
    location: Location
    config: Any
    dtype: torch.dtype
    device: torch.device

    def with_tokens_of(self, tokenizer: Any) -> BaseRequest:
        """Complete a head that reads a row's last token, or that starts from words.

        Raises:
            BaseError: A word is not a single token.
        """
        head, text = self.purpose.head, self.config.get_text_config()
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
        dtype: By default as `compute_dtype` says.

    Raises:
        BaseError: It is missing, damaged, or of a model for another purpose.
    """
    if settings.rope_scaling:
        purpose = replace(purpose, rope_scaling=settings.rope_scaling)
    config = check_config(location, purpose)
    dtype = dtype or compute_dtype(settings, device)
    return BaseRequest(settings, purpose, location, config, dtype, device)


def compute_dtype(settings: BaseConfig, device: torch.device) -> torch.dtype:
    """Return `base.dtype`; auto: the dtype that a device multiplies fastest in."""
    return DTYPES.get(settings.dtype) or fast_dtype(device)


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that a device multiplies fastest in: bf16, or the closest to it."""
    if (gpu := gpu_of(device)) is not None:
        return gpu.fast_dtype()
    # without the units bf16 is slower than fp32
    return torch.bfloat16 if device.type == "cpu" and has_bf16_units() else torch.float32


def has_bf16_units() -> bool:
    """Tell whether this CPU multiplies in bf16, and oneDNN is not told to leave that out."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in WITHOUT_BF16:
        return False
    flags = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def fits_device(weights: int, free: int, step_fits: Callable[[], bool] | None = None) -> bool:
    """Tell whether a base stays whole on its device.

    It does if its weights take less than half of the free memory, and does not if they take more
    than all of it. In between the smallest training step decides.

    Args:
        weights, free: Bytes of the weights as they are kept, and of the device's free memory.
        step_fits: Counts that step; None: nothing is trained.
    """
    if weights <= HALF * free:
        return True
    if weights > free:
        return False
    return weights <= ROOM * free if step_fits is None else step_fits()


@dataclass(frozen=True, slots=True)
class WeightLocation:
    """Where a base's weights are kept.

    Attributes:
        device: The device that computes.
        streamed: Whether packed blocks wait in main memory.
        notice: What the user should know of it, or "".
    """

    device: torch.device
    streamed: bool = False
    notice: str = ""


def place_of_weights(request: BaseRequest, placement: str, *, may_use_cpu: bool) -> WeightLocation:
    """Return where a base's weights go.

    Args:
        placement: "device" or "stream"; "auto": by the memory that is free.
        may_use_cpu: Whether a base that neither fits the device nor can be streamed is computed on
            the CPU.

    Raises:
        BaseError: It does not fit the device and may go nowhere else, or has no packed weights.
    """
    may_stream = is_packed(request.config, request.settings)
    if placement == "stream" and not may_stream:
        raise BaseError(
            "a base that is not packed cannot be streamed.",
            found="base.quantize is none.",
            fix="Set base.quantize to nf4, fp4 or int8, or base.placement: device.",
        )
    device, here = request.device, free_now(request.device)
    if placement != "auto" or not here.on_gpu:
        return WeightLocation(device, placement == "stream")
    size = weight_bytes(request.config, request.settings, request.purpose, request.dtype)
    if fits_device(size, here.usable):
        return WeightLocation(device)
    sizes = in_words(size, here.usable)
    if may_stream and here.kind == "cuda":
        return WeightLocation(device, True, f"{STREAMED} {sizes}")
    if may_use_cpu:
        return WeightLocation(torch.device("cpu"), False, f"All is computed on the CPU. {sizes}")
    raise BaseError(
        "the base does not fit the GPU.",
        found=sizes,
        fix="Set base.quantize: nf4 and base.placement: auto; see what fits: peftkit plan MODEL",
    )


def in_words(weights: int, free: int) -> str:
    """Return the bytes of a base, and of the memory that is free, as a sentence."""
    return f"The base takes {weights / 1e9:.2f} GB; {free / 1e9:.2f} GB are free."
