"""Checkpoints that are quantised already: taken over as they are, dequantised, or refused by name.

Those of bitsandbytes are loaded by transformers and taken over with their bits. FP8 and MXFP4 (as
gpt-oss has it) cannot be trained through: they are dequantised tensor by tensor while they are
loaded, and are then what any checkpoint is: packed again if asked.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from peftkit.base.packing_loader import Broken
from peftkit.errors import BaseError

TAKEN_OVER = "bitsandbytes"
DEQUANTISED = ("fp8", "mxfp4")


def quantized_by(config: Any) -> str:
    """Return what a checkpoint was quantised with, as its config says, or ""."""
    found = _settings(config)
    if not found:
        return ""
    bits = found.get("load_in_4bit") or found.get("load_in_8bit")
    return TAKEN_OVER if bits else str(found.get("quant_method") or "an unknown method")


def check_readable(name: str, config: Any) -> None:
    """See that a checkpoint is dense, or quantised in a way that is read here.

    Raises:
        BaseError: It is quantised otherwise.
    """
    method = quantized_by(config)
    if method in ("", TAKEN_OVER, *DEQUANTISED):
        return
    raise BaseError(
        f"cannot read the weights of {name}.",
        found=f"They are quantised by {method}.",
        fix="Give the same model in 16 bits (quantize: nf4 packs it while it is read), or one that "
        f"is quantised by {', '.join((TAKEN_OVER, *DEQUANTISED))}.",
    )


def dequantizer(config: Any) -> tuple[Any, HfQuantizer]:
    """Return the config of the dense model, and what of transformers makes its weights."""
    settings = _settings(config) | {"dequantize": True}
    made: Any = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    if settings["quant_method"] == "fp8":
        made.get_load_operations = lambda: {"dequantize": _Fp8Blocks}
    dense = copy.deepcopy(config)
    for part in (dense, dense.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return dense, made


class _Fp8Blocks(Fp8Dequantize):
    """Multiplies FP8 values by the scale of their block, as `weight_block_size` says.

    transformers divides the shape by the number of scales instead: where the last block is partial
    (192 rows in blocks of 128), that gives other blocks, or an error.
    """

    def _dequantize_one(
        self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        block = self.hf_quantizer.quantization_config.weight_block_size
        if quantized.dtype != torch.float8_e4m3fn or scales.ndim < 2 or not block:
            return super()._dequantize_one(quantized, scales, output_dtype)
        shape, grid = quantized.shape[-2:], scales.shape[-2:]
        if grid != tuple(-(-side // of) for side, of in zip(shape, block, strict=True)):
            raise Broken(
                BaseError(
                    f"cannot read an FP8 weight of {shape[0]} x {shape[1]}.",
                    found=f"It has {grid[0]} x {grid[1]} scales; its weight_block_size is {block}.",
                    fix="Give the model as it was published, or in 16 bits.",
                )
            )
        if scales.dtype == torch.uint8:  # exponents
            scales = (scales.float() - 127).exp2()
        spread = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        values = quantized.float() * spread[..., : shape[0], : shape[1]]
        return values.to(output_dtype or torch.bfloat16)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Have transformers read a tensor when its turn comes, instead of ahead, by several threads."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _settings(config: Any) -> dict[str, Any]:
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found:
            return dict(found if isinstance(found, dict) else found.to_dict())
    return {}
