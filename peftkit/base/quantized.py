"""Checkpoints that are quantised already: their bits are kept, or they are refused by name.

Those of bitsandbytes are loaded by transformers and taken over with their bits. Those that
published.py reads keep their codes; such of 8 bits, and gpt-oss, can be packed in 4 bits if asked.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peftkit.base.published import UnreadableError, scheme_of
from peftkit.errors import BaseError

TAKEN_OVER = "bitsandbytes"
READ = (
    "compressed-tensors (w4a16, w8a16, w8a8, fp8, nvfp4, mxfp4), AWQ (gemm), GPTQ in 4 or 8 bits, "
    "auto-round, FP8, ModelOpt NVFP4, torchao int8 and float8, bitsandbytes"
)


def quantized_by(config: Any) -> str:
    """Return what a checkpoint was quantised with, as its config says, or ""."""
    found = _settings(config)
    if not found:
        return ""
    bits = found.get("load_in_4bit") or found.get("load_in_8bit")
    return TAKEN_OVER if bits else str(found.get("quant_method") or "an unknown method")


def published(config: Any) -> dict[str, Any] | None:
    """Return a config's `quantization_config` if published.py reads such a checkpoint."""
    if quantized_by(config) in ("", TAKEN_OVER):
        return None
    try:
        scheme_of(_settings(config))
    except UnreadableError:
        return None
    return _settings(config)


def check_readable(name: str, config: Any, quantize: str = "none") -> None:
    """See that a checkpoint is dense, or quantised in a way that is read here.

    Args:
        quantize: How it is to be kept.

    Raises:
        BaseError: It is quantised otherwise, or is in 4 bits and is to be packed again.
    """
    if quantized_by(config) in ("", TAKEN_OVER):
        return
    try:
        scheme = scheme_of(_settings(config))
    except UnreadableError as problem:
        raise BaseError(
            f"cannot read the weights of {name}.",
            found=f"They are quantised by {problem}.",
            fix="Give the same model in 16 bits (quantize: nf4 packs it while it is read), or in a "
            f"format that is read: {READ}.",
        ) from None
    if quantize != "none" and scheme.bits == 4 and scheme.layout != "gpt_oss":
        raise BaseError(
            f"the weights of {name} are in 4 bits already.",
            found=f"base.quantize is {quantize}, which would round them a second time.",
            fix="Set base.quantize: none, which keeps these bits; or give the model in 16 bits.",
        )


def dense_config(config: Any) -> Any:
    """Return the config of the same model in 16 bits."""
    dense = copy.deepcopy(config)
    for part in (dense, dense.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return dense


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
