"""Checkpoints that are quantised already: taken over as they are, dequantised, or refused by name.

Those of bitsandbytes are loaded by transformers and taken over with their bits. FP8 and MXFP4 (as
gpt-oss has it) cannot be trained through: they are dequantised tensor by tensor, by transformers'
own operations, and are then what any checkpoint is: packed anew if asked.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

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
    made: HfQuantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    dense = copy.deepcopy(config)
    for part in (dense, dense.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return dense, made


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
