"""Models without weights, built from a config alone: complete, with few blocks, or packed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import masking_utils

from peftkit.base.locate import Location, locate
from peftkit.base.pretrained import (
    check_config,
    explained,
    published,
    published_codes,
    quiet,
    reachable,
    without_quantization,
)
from peftkit.base.purpose import CAUSAL_LM, Purpose, head_modules
from peftkit.quant.layers import Packing, empty_packed
from peftkit.quant.quantize import (
    Job,
    has_plain_forward,
    install_packed,
    stores_transposed,
    weights_to_pack,
)
from peftkit.settings import BaseConfig

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


def hollow(model: nn.Module) -> nn.Module:
    """Give a model on the meta device weights on the CPU, all of them zero, that take no memory.

    An adapter loads onto it as onto any model. Tied weights stay tied. Buffers are zero as well, so
    that a token can go through it, which shows the sizes of its key-value cache.
    """
    zeros: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in zeros:
                values = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                zeros[parameter] = nn.Parameter(values, requires_grad=False)
            module._parameters[name] = None if parameter is None else zeros[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return model


def read_config(model: str, revision: str | None, purpose: Purpose) -> Any:
    """Read a model's config; nothing else of it is downloaded.

    Raises:
        BaseError: There is no such model, its config is of no use, or its weights are quantised in
            a way that is not read here.
    """
    location, config = find_config(model, revision, purpose)
    if (checkpoint := published(config)) is not None:
        checkpoint.check(location.name)
    return config


def find_config(model: str, revision: str | None, purpose: Purpose) -> tuple[Location, Any]:
    """Return where a model is, and its config."""
    location = reachable(locate(model, revision))
    return location, check_config(location, purpose)


def on_meta(config: Any, purpose: Purpose, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a model on the meta device; its dtype is by default the config's."""
    cls = getattr(transformers, purpose.auto_class)
    config = without_quantization(config)
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
    """Have transformers treat tensors without data like those of a step.

    It would take them for the tracing of a graph, and make other masks.
    """
    module: Any = masking_utils
    before = module.is_tracing
    module.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        module.is_tracing = before


def packed_skeleton(
    config: Any,
    settings: BaseConfig,
    purpose: Purpose,
    dtype: torch.dtype,
    *,
    counted: bool = False,
) -> Any:
    """Build the packed model on the meta device.

    Args:
        counted: Under a mode in which tensors have no data: packed ones are on the CPU, and layers
            that have to be called to know what they compute are packed too.
    """
    model = _tied(config, purpose, dtype)
    device = torch.device("cpu" if counted else "meta")
    uses = _packed_weights(model, config, settings, purpose, dtype, device)
    parameters: dict[int, nn.Parameter] = {}
    packings: dict[int, Packing] = {}
    for (_, module, name), parameter, packing in uses:
        if counted or name != "weight" or _is_known(module):
            parameters[id(module._parameters[name])] = parameter
            packings[id(parameter)] = packing
    for (_, module, name), _, _ in uses:
        weight = id(module._parameters[name])
        module._parameters[name] = parameters.get(weight, module._parameters[name])
    install_packed(model, [job for job, _, _ in uses], packings, device)
    return model


def _is_known(module: nn.Module) -> bool:
    """Tell by a module's class alone what it computes with its weight."""
    return isinstance(module, nn.Embedding) or has_plain_forward(module)


@dataclass(frozen=True, slots=True)
class WeightFootprint:
    """The part of a base that one device holds.

    Attributes:
        resident: Bytes that are always on the device.
        passing: Peak bytes of the blocks that come and go.
        moved: Bytes that reach the device in a forward and backward pass that recomputes.
        elsewhere: Bytes that wait in main memory.
    """

    resident: int
    passing: int = 0
    moved: int = 0
    elsewhere: int = 0

    @property
    def at_most(self) -> int:
        """Bytes on the device."""
        return self.resident + self.passing


def weight_bytes(config: Any, settings: BaseConfig, purpose: Purpose, dtype: torch.dtype) -> int:
    """Return the bytes of a base's weights as they are kept, with their scales."""
    model = _tied(config, purpose, dtype)
    sizes = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    meta = torch.device("meta")
    for job, packed, packing in _packed_weights(model, config, settings, purpose, dtype, meta):
        _, module, name = job
        scales = sum(scale.nbytes for scale in packing.parameters())
        sizes[id(module._parameters[name])] = packed.nbytes + scales
    return sum(sizes.values())


def _tied(config: Any, purpose: Purpose, dtype: torch.dtype) -> Any:
    model: Any = on_meta(config, purpose, dtype)
    model.tie_weights()
    return model


def _packed_weights(
    model: Any,
    config: Any,
    settings: BaseConfig,
    purpose: Purpose,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[Job, nn.Parameter, Packing]]:
    """Return every use of a weight that is packed, with its packed form; tied ones share it."""
    checkpoint = published_codes(config, settings)
    if settings.quantize == "none" and checkpoint is None:
        return []
    head = head_modules(model) if purpose.head is not None else ()
    by_weight: dict[int, tuple[nn.Parameter, Packing]] = {}
    uses = []
    tables = checkpoint is not None and checkpoint.is_gguf
    for job, kind in weights_to_pack(settings, model, head, tables=tables).items():
        path, module, name = job
        weight = module._parameters[name]
        if weight is None:
            continue
        if id(weight) not in by_weight:
            if checkpoint is not None and not checkpoint.quantizes(f"{path}.{name}", weight):
                continue
            transposed = stores_transposed(module, name)
            shape = torch.Size(reversed(weight.shape)) if transposed else weight.shape
            with torch.device(device):
                if checkpoint is not None:
                    packed, packing = checkpoint.empty_packed(shape, path, name, dtype)
                else:
                    packed, packing = empty_packed(
                        shape, kind, dtype, double_quant=settings.double_quant
                    )
            by_weight[id(weight)] = nn.Parameter(packed, requires_grad=False), packing
        uses.append((job, *by_weight[id(weight)]))
    return uses
