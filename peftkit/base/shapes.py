"""Models without weights: whole, or with a few of their blocks, out of a config alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import masking_utils

from peftkit.base import pretrained
from peftkit.base.locate import locate
from peftkit.base.purpose import Purpose
from peftkit.base.quantized import check_readable

DEPTHS = (
    *("num_hidden_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "n_layers", "n_layer"),
)
"""Fields of configs that count blocks."""


def read_config(model: str, revision: str | None, purpose: Purpose) -> Any:
    """Read a model's config; nothing else of it is downloaded.

    Raises:
        BaseError: There is no such model, its config is of no use, or its weights are quantised in
            a way that is not read here.
    """
    location, revision = pretrained.reachable(locate(model, revision), revision)
    config = pretrained.check_config(location, revision, purpose)
    check_readable(location.name, config)
    return config


def on_meta(config: Any, purpose: Purpose, dtype: torch.dtype) -> nn.Module:
    """Build a model on the meta device."""
    cls = getattr(transformers, purpose.auto_class)
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    with pretrained.quiet(), torch.device("meta"):
        model: nn.Module = cls.from_config(config, trust_remote_code=False, dtype=dtype)
    return model.eval()


def with_depth(config: Any, depth: int) -> Any:
    """Return a model's config with at most so many blocks in each of its stacks."""
    config = copy.deepcopy(config)
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in filter(None, parts):
        for name in DEPTHS:
            have = part.__dict__.get(name)
            if isinstance(have, int) and have > depth:
                for field, value in list(part.__dict__.items()):
                    if isinstance(value, list | tuple) and len(value) == have:
                        setattr(part, field, value[:depth])
                setattr(part, name, depth)
    return config


@contextmanager
def untraced() -> Iterator[None]:
    """Have transformers take tensors without data for what they stand for.

    For the tracing of a graph it would make masks that a step does not make.
    """
    module: Any = masking_utils
    before = module.is_tracing
    module.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        module.is_tracing = before
