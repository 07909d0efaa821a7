"""Models without weights, built from a config: complete, with few blocks, or packed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import masking_utils

from peftkit.base.locate import Location, locate
from peftkit.base.pretrained import (
    config_for,
    explained,
    published,
    published_codes,
    quiet,
    reachable,
    without_quantization,
)
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.model.places import head_modules
from peftkit.quant.layers import Job, Packing, empty_packed
from peftkit.quant.quantize import (
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
    """Build a model without weights, on the meta device, from its config.

    Raises:
        BaseError: There is no such model, or its config cannot be used.
    """
    location, config = find_config(model, revision, purpose)
    with explained(location):
        return on_meta(config, purpose)


def hollow(model: nn.Module) -> nn.Module:
    """Replace a meta model's weights by zeros on the CPU that take no memory.

    Adapters can be loaded onto it. Tied weights stay tied. Buffers are also zero: a forward pass of
    one token shows the sizes of the key-value cache.
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
    """Read a model's config, without downloading other files.

    Raises:
        BaseError: There is no such model, its config cannot be used, or its weights have an
            unsupported quantisation.
    """
    location, config = find_config(model, revision, purpose)
    if (checkpoint := published(config)) is not None:
        checkpoint.check(location.name)
    return config


def find_config(model: str, revision: str | None, purpose: Purpose) -> tuple[Location, object]:
    """Locate a model, and read its config."""
    location = reachable(locate(model, revision))
    return location, config_for(location, purpose)


def on_meta(config: object, purpose: Purpose, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a model on the meta device, by default in the config's dtype."""
    cls = getattr(transformers, purpose.auto_class)
    config = without_quantization(config)
    options = {} if dtype is None else {"dtype": dtype}
    with quiet(), torch.device("meta"):
        model: nn.Module = cls.from_config(config, trust_remote_code=False, **options)
    return model.eval()


def with_depth(config: Any, depth: int) -> Any:
    """Return a model's config with at most `depth` blocks in each of its stacks."""
    config = copy.deepcopy(config)
    configs = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for stack in filter(None, configs):
        for name in DEPTHS:
            num_blocks = stack.__dict__.get(name)
            if isinstance(num_blocks, int) and num_blocks > depth:
                for field, value in list(stack.__dict__.items()):
                    if isinstance(value, list | tuple) and len(value) == num_blocks:
                        setattr(stack, field, value[:depth])
                setattr(stack, name, depth)
    return config


@contextmanager
def untraced() -> Iterator[None]:
    """Make transformers treat tensors without data like ordinary tensors.

    It would otherwise assume tracing, and build other masks.
    """
    module: Any = masking_utils
    before = module.is_tracing
    module.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        module.is_tracing = before


def packed_skeleton(
    config: object,
    settings: BaseConfig,
    purpose: Purpose,
    dtype: torch.dtype,
    *,
    counted: bool = False,
) -> Any:
    """Build the packed model on the meta device.

    Args:
        counted: Whether FakeTensorMode is active. Packed tensors are then on the CPU, and layers
            of unknown classes, which must be called to test them, are packed too.
    """
    with unset_fake_temporarily():  # fake parameters cannot change their dtype while they are built
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
    """Return whether a module's class determines what it computes with its weight."""
    return isinstance(module, nn.Embedding) or has_plain_forward(module)


@dataclass(frozen=True, slots=True)
class WeightFootprint:
    """Bytes of a base's weights by location.

    Attributes:
        resident: Bytes that are always on the device.
        passing: Peak bytes of streamed blocks on the device.
        moved: Bytes transferred to the device in a forward and backward pass with recomputation.
        elsewhere: Bytes in host memory.
    """

    resident: int
    passing: int = 0
    moved: int = 0
    elsewhere: int = 0

    @property
    def at_most(self) -> int:
        """Peak bytes on the device."""
        return self.resident + self.passing


def weight_bytes(config: object, settings: BaseConfig, purpose: Purpose, dtype: torch.dtype) -> int:
    """Return the bytes of a base's weights as stored, with their scales."""
    model = _tied(config, purpose, dtype)
    sizes = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    meta = torch.device("meta")
    for job, packed, packing in _packed_weights(model, config, settings, purpose, dtype, meta):
        _, module, name = job
        scales = sum(scale.nbytes for scale in packing.parameters())
        sizes[id(module._parameters[name])] = packed.nbytes + scales
    return sum(sizes.values())


def _tied(config: object, purpose: Purpose, dtype: torch.dtype) -> Any:
    model: Any = on_meta(config, purpose, dtype)
    model.tie_weights()
    return model


def _packed_weights(
    model: nn.Module,
    config: object,
    settings: BaseConfig,
    purpose: Purpose,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[Job, nn.Parameter, Packing]]:
    """Return every use of a packed weight, with its packed form, which tied weights share."""
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
