"""A base to load: its settings, and what follows from its files and from this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peftkit.base.locate import Location
from peftkit.base.pretrained import check_config
from peftkit.base.purpose import Purpose
from peftkit.kernels.device import gpu_of
from peftkit.quant.quantize import Job, quantizable, tower_paths
from peftkit.settings import BaseConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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


def weights_to_pack(settings: BaseConfig, model: nn.Module, head: Sequence[str]) -> dict[Job, str]:
    """Return the weights of a model that are packed, and the kind of each ("nf4", ...).

    Args:
        head: Paths of the modules of its head, which stay as they are.
    """
    packs_towers = settings.quantize_towers or settings.quantize == "none"  # as in the files
    keep = head if packs_towers else (*head, *tower_paths(model))
    jobs: dict[Job, str] = dict.fromkeys(quantizable(model, keep), settings.quantize)
    if settings.quantize_embeddings != "none":
        both = quantizable(model, keep, embeddings=True)
        jobs |= dict.fromkeys(both[len(jobs) :], settings.quantize_embeddings)
    return jobs


def compute_dtype(settings: BaseConfig, device: torch.device) -> torch.dtype:
    """Return `base.dtype`; auto: the dtype that a device multiplies fastest in."""
    return DTYPES.get(settings.dtype) or fast_dtype(device)


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that a device multiplies fastest in: bf16, or the closest to it."""
    if (gpu := gpu_of(device)) is not None:
        return gpu.fast_dtype()
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    has_bf16 = flags & {"avx512_bf16", "amx_bf16", "bf16"}  # without them it is slower than fp32
    return torch.bfloat16 if has_bf16 and device.type == "cpu" else torch.float32
