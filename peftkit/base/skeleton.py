"""Models without weights, out of a config alone: whole, with few blocks, or packed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import masking_utils

from peftkit.base.codes import empty_codes
from peftkit.base.locate import Location, locate
from peftkit.base.pretrained import check_config, explained, quiet, reachable
from peftkit.base.published import check_readable, has_codes, published, scheme_of
from peftkit.base.purpose import CAUSAL_LM, Purpose, head_of_classes
from peftkit.base.request import StorageFormat
from peftkit.kernels.packing import Packing
from peftkit.quant.layers import empty_packed
from peftkit.quant.quantize import (
    has_plain_forward,
    install_packed,
    is_turned,
)

DEPTHS = (
    *("num_hidden_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "n_layers", "n_layer"),
)
"""Fields of configs that count blocks."""


def skeleton(model: str, *, revision: str | None = None, purpose: Purpose = CAUSAL_LM) -> nn.Module:
    """Build a model without its weights, on the meta device, out of its config alone.

    Raises:
        BaseError: There is no such model, or its config is of no use.
    """
    location, config = find_config(model, revision, purpose)
    with explained(location):
        return on_meta(config, purpose)


def read_config(model: str, revision: str | None, purpose: Purpose) -> Any:
    """Read a model's config; nothing else of it is downloaded.

    Raises:
        BaseError: There is no such model, its config is of no use, or its weights are quantised in
            a way that is not read here.
    """
    location, config = find_config(model, revision, purpose)
    check_readable(location.name, config)
    return config


def find_config(model: str, revision: str | None, purpose: Purpose) -> tuple[Location, Any]:
    """Return where a model is, and its config."""
    location = reachable(locate(model, revision))
    return location, check_config(location, purpose)


def on_meta(config: Any, purpose: Purpose, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a model on the meta device; its dtype is by default the config's."""
    cls = getattr(transformers, purpose.auto_class)
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    given = {} if dtype is None else {"dtype": dtype}
    with quiet(), torch.device("meta"):
        model: nn.Module = cls.from_config(config, trust_remote_code=False, **given)
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


def packed_skeleton(
    config: Any, purpose: Purpose, form: StorageFormat, *, counted: bool = False
) -> Any:
    """Build the packed model on the meta device.

    Args:
        counted: Under a mode in which tensors have no data: packed ones are on the CPU, and layers
            that have to be called to know what they compute are packed too.
    """
    model: Any = on_meta(config, purpose, form.dtype)
    model.tie_weights()
    settings = published(config) if form.quantize == "none" else None
    if form.quantize == "none" and settings is None:
        return model
    head = head_of_classes(model) if purpose.head is not None else ()
    jobs = form.jobs(model, head)
    device = torch.device("cpu" if counted else "meta")
    made: dict[int, nn.Parameter] = {}  # of each weight, which may be tied
    packings = {}
    for (path, module, name), kind in jobs.items():
        weight = module._parameters[name]
        if settings is not None and not has_codes(settings, weight):
            continue
        is_known = counted or isinstance(module, nn.Embedding) or has_plain_forward(module)
        if name == "weight" and not is_known:
            continue
        assert weight is not None
        shape = torch.Size(reversed(weight.shape)) if is_turned(module, name) else weight.shape
        if id(weight) not in made:
            with torch.device(device):
                if settings is not None:
                    packed, kept, scales = empty_codes(shape, scheme_of(settings, path))
                    packing = Packing(kept, form.dtype, scales)
                else:
                    packed, packing = empty_packed(
                        shape, kind, form.dtype, double_quant=form.double_quant
                    )
            made[id(weight)] = nn.Parameter(packed, requires_grad=False)
            packings[id(made[id(weight)])] = packing
    for _, module, name in jobs:
        if (known := made.get(id(module._parameters[name]))) is not None:
            module._parameters[name] = known
    install_packed(model, jobs, packings, device)
    return model
