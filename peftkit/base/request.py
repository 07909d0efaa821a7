"""Which base is asked for: its files, what it is for, and how it is held in memory."""

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

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """How a base is held in memory.

    Attributes:
        quantize: "none", "nf4", "fp4" or "int8".
        double_quant: Quantise the scales of nf4 and fp4 as well.
        dtype: Of all computing and of what is not packed.
        device: Where it is.
        quantize_towers: Pack what stands beside a language model too.
        embeddings: As `quantize`, of the embedding of tokens and the output layer.
    """

    quantize: str
    double_quant: bool
    dtype: torch.dtype
    device: torch.device
    quantize_towers: bool = False
    embeddings: str = "none"

    def jobs(self, model: nn.Module, head: Sequence[str]) -> dict[Job, str]:
        """Return the weights of a model that are packed, and in which kind.

        Args:
            head: Paths of the modules of its head, which are not.
        """
        packs_towers = self.quantize_towers or self.quantize == "none"  # as its files have them
        keep = head if packs_towers else (*head, *tower_paths(model))
        found = dict.fromkeys(quantizable(model, keep), self.quantize)
        if self.embeddings != "none":
            both = quantizable(model, keep, embeddings=True)
            found |= dict.fromkeys(both[len(found) :], self.embeddings)
        return found


@dataclass(frozen=True, slots=True)
class BaseRequest:
    """A base as it is to be loaded.

    Attributes:
        location: Where its files can be read. config: Of transformers, with the head of `purpose`.
    """

    location: Location
    purpose: Purpose
    config: Any
    form: StorageFormat

    def with_tokens_of(self, tokenizer: Any) -> BaseRequest:
        """Return what is asked of a head that reads a row's last token, or begins with words.

        Raises:
            BaseError: A word is not a single token.
        """
        head, text = self.purpose.head, self.config.get_text_config()
        if head is None:
            return self
        if tokenizer is not None and getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = tokenizer.pad_token_id
        return replace(self, purpose=replace(self.purpose, head=head.with_tokens(tokenizer)))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A frozen model in eval mode.

    Attributes:
        fingerprint: Of config and weights as they were before packing.
        head: Paths of the modules of its head, if it was loaded for one.
    """

    model: Any
    fingerprint: str
    head: tuple[str, ...]


def request_of(location: Location, purpose: Purpose, form: StorageFormat) -> BaseRequest:
    """Read a base's config, and say what is asked of it.

    Raises:
        BaseError: It is missing, damaged, or of a model for something else.
    """
    return BaseRequest(location, purpose, check_config(location, purpose), form)


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the precision that a device multiplies fastest at: bf16, or what is next to it."""
    if (gpu := gpu_of(device)) is not None:
        return gpu.fast_dtype()
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    has_bf16 = flags & {"avx512_bf16", "amx_bf16", "bf16"}  # without them it is slower than fp32
    return torch.bfloat16 if has_bf16 and device.type == "cpu" else torch.float32
