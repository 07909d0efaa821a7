"""Bottleneck adapters: y = h + s U f(D x + a) + b, small networks at the sublayers of a block.

h is the output of a sublayer, before its dropout and before the residual is added. D projects down
to a few features, f is a nonlinearity. U and b start at zero: a fresh adapter changes nothing.

- houlsby: x = h, after every attention and feed-forward sublayer (Houlsby et al., 2019,
  arXiv:1902.00751): two per block, three if a decoder also attends to an encoder;
- pfeiffer: x = h, after the feed-forward sublayer only (Pfeiffer et al., 2020, arXiv:2005.00247);
- parallel: x is the input of the feed-forward sublayer (He et al., 2021, arXiv:2110.04366).

A mixture of experts is one sublayer: h is the joint output of its routed and shared experts.

Shapes: n is the adapter's width, `...` any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from peftkit.errors import AdapterError, TargetError, did_you_mean, first_few
from peftkit.files.strict_json import JsonMap
from peftkit.methods.base import ADAPTER_DTYPES, AdapterModule, Handles, Method, Modules
from peftkit.methods.peft_format import LAYERS, PeftFormat
from peftkit.model import roles as table
from peftkit.model.blocks import Sublayer, find_sublayers, width_of
from peftkit.model.roles import matches
from peftkit.model.targets import Site, resolve

ALL = "blocks"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
_NAMES = ("adapter_down.weight", "adapter_down.bias", "adapter_up.weight", "adapter_up.bias")


class BottleneckModule(AdapterModule):
    """The frozen last module of a sublayer plus a trainable bottleneck.

    Args:
        base: Returns (..., features), or a tuple with this tensor first.

    Attributes:
        parallel: The bottleneck reads the sublayer's input (see `read`), not the base's output.
        down_weight, down_bias: (n, features), (n,).
        up_weight, up_bias: (features, n), (features,).
    """

    def __init__(self, base: nn.Module, site: Site, size: int, method: Bottleneck) -> None:
        super().__init__(base, site)
        features, dtype = width_of(base), ADAPTER_DTYPES[method.dtype]
        self.activation, self.scale = ACTIVATIONS[method.activation], method.scale
        self.parallel = method.style == "parallel"
        self.dropout = nn.Dropout(method.dropout) if method.dropout else nn.Identity()
        self.down_weight = self.new_parameter(size, features, dtype=dtype)
        self.down_bias = self.new_parameter(size, dtype=dtype)
        self.up_weight = self.new_parameter(features, size, dtype=dtype)
        self.up_bias = self.new_parameter(features, dtype=dtype)
        self.input: Tensor | None = None  # set only while the sublayer runs

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
        """Store the input of a sublayer; a forward pre-hook of the module that reads it."""
        if self.enabled:
            self.input = (*args, *kwargs.values())[0]

    def forward(self, *args: object, **kwargs: object) -> Any:
        out = self.base(*args, **kwargs)
        if not self.enabled:
            return out
        hidden, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        x, self.input = (self.input if self.parallel else hidden), None
        assert x is not None, f"{self.site.path} ran before the input of its sublayer was read"
        # experts may return (tokens, features) for an input of (batch, time, features)
        hidden = hidden + self.update(x, hidden.dtype).reshape(hidden.shape)
        return hidden if rest is None else (hidden, *rest)

    def update(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bottleneck's output for x (..., features), of the same shape."""
        down, down_bias = self.down_weight.to(dtype), self.down_bias.to(dtype)
        up, up_bias = ((self.scale * t).to(dtype) for t in (self.up_weight, self.up_bias))
        inner = self.activation(functional.linear(x.to(dtype), down, down_bias))  # (..., n)
        return functional.linear(self.dropout(inner), up, up_bias)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(self.down_weight.shape[1])  # as nn.Linear, drawn on the CPU
        drawn = torch.empty(self.down_weight.shape).uniform_(-bound, bound, generator=generator)
        self.down_weight.copy_(drawn)
        for zero in (self.down_bias, self.up_weight, self.up_bias):
            zero.zero_()

    def state(self) -> dict[str, Tensor]:
        tensors = (self.down_weight, self.down_bias, self.up_weight, self.up_bias)
        return {name: tensor.detach() for name, tensor in zip(_NAMES, tensors, strict=True)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


class Bottleneck(Method):
    """Small networks after the sublayers of each block, or parallel to them."""

    files: ClassVar[str] = ""
    unmergeable: ClassVar[str] = "it adds nonlinear layers, which no weight can represent"

    type: Literal["bottleneck"] = "bottleneck"
    targets: tuple[str, ...] | str = ALL
    """blocks: all blocks; a side: language, vision, audio, encoder, decoder; or names of blocks or
    of the last modules of sublayers, with shell wildcards: [layers.0, layers.1.mlp]."""
    style: Literal["houlsby", "pfeiffer", "parallel"] = "pfeiffer"
    """houlsby: after attention and feed-forward; pfeiffer: after feed-forward only;
    parallel: on the input of feed-forward, added to its output."""
    reduction: int = Field(default=16, ge=1)
    """Ratio of the model's width to the adapter's; ignored if `size` is given."""
    size: int | None = Field(default=None, ge=1)
    """Width of the adapter, instead of `reduction`."""
    activation: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    """Nonlinearity of the adapter."""
    scale: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Factor on the adapter's output; He et al. use 4 with style parallel."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the hidden activations."""

    def sites(self, model: nn.Module) -> list[Site]:
        parts = self._parts(model)
        paths_of = {target: _chosen(model, parts, target) for target in self.target_names}
        failed = [target for target, paths in paths_of.items() if not paths]
        if failed or not paths_of or not parts:
            raise _no_match(model, parts, failed)
        chosen = {path for paths in paths_of.values() for path in paths}
        return [Site(path=part.path, roles=()) for part in parts if part.path in chosen]

    def candidates(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return {part.path: () for part in self._parts(model)}

    def _parts(self, model: nn.Module) -> list[Sublayer]:
        parts = find_sublayers(model)
        parts = [part for part in parts if part.kind == "ffn" or self.style == "houlsby"]
        without_reader = [part.path for part in parts if not part.reads]
        if self.style == "parallel" and without_reader:
            raise TargetError(
                f"style parallel is not possible for the sublayer that ends in {without_reader[0]}",
                found="No module of its block is recognised as reading the sublayer's input.",
                fix="Use style pfeiffer or houlsby.",
            )
        return parts

    def wrap(self, base: nn.Module, site: Site) -> BottleneckModule:
        features = width_of(base)
        size = self.size or features // self.reduction
        if not 0 < size <= features:
            setting = f"size {size}" if self.size else f"reduction {self.reduction}"
            raise TargetError(
                f"bottleneck with {setting} does not fit {site.path}",
                found=f"It has {features} output features.",
                fix=f"Use a size from 1 to {features}.",
            )
        return BottleneckModule(base, site, size, self)

    def connect(self, model: nn.Module, modules: Modules) -> Handles:
        handles = []
        for part in self._parts(model) if self.style == "parallel" else ():
            if isinstance(module := modules.get(part.path), BottleneckModule):
                reader = model.get_submodule(part.reads)
                handles.append(reader.register_forward_pre_hook(module.read, with_kwargs=True))
        return handles


class BottleneckFormat(PeftFormat[Bottleneck]):
    """peftkit's file format in the layout of PEFT's, which has no such method."""

    peft_type = "BOTTLENECK"
    method_class = Bottleneck
    settings: ClassVar[Mapping[str, str]] = {
        name: name for name in ("style", "reduction", "size", "activation", "scale", "dropout")
    }
    known_fields = ("target_modules",)
    absent_fields = ("bias", "fan_in_fan_out", *LAYERS)

    def method(self, fields: JsonMap) -> Bottleneck:
        missing = [name for name in self.settings if name not in fields]
        if missing:
            raise AdapterError(
                "the adapter's config is not valid", found=f"it has no {', '.join(missing)}"
            )
        return super().method(fields)


def _chosen(model: nn.Module, parts: list[Sublayer], target: str) -> set[str]:
    """Return the last modules of the sublayers that match a target."""
    if target == ALL:
        return {part.path for part in parts}
    if target in table.QUALIFIERS:
        try:
            paths = [site.path for site in resolve(model, f"{target}.{table.ALL_LINEAR}")]
        except TargetError:  # the model has no such side
            return set()
        return {p.path for p in parts if any(path.startswith(f"{p.block}.") for path in paths)}
    return {part.path for part in parts if any(matches(n, target) for n in (part.path, part.block))}


def _no_match(model: nn.Module, parts: list[Sublayer], failed: list[str]) -> TargetError:
    name, blocks = type(model).__name__, list(dict.fromkeys(part.block for part in parts))
    if not blocks:
        return TargetError(
            f"{name} has no blocks with a feed-forward part for bottleneck adapters.",
            fix="Use a method for linear layers, such as lora.",
        )
    hint = did_you_mean(failed[0], [ALL, *table.QUALIFIERS]) if failed else ""
    return TargetError(
        f"no block matches {', '.join(map(repr, failed)) or 'no target'} in {name}.",
        found=f"Its blocks: {first_few(blocks, 4, ', ')}. {hint}".rstrip(),
        fix=f"Use '{ALL}' for all of them.",
    )
