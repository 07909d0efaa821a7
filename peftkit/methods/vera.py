"""VeRA: y = W x + b * B (d * (A x))  (Kopiczko et al., 2023, arXiv:2310.11454).

A and B are random, frozen and shared by all layers, each of which uses the first columns of A and
the first rows of B. Only the vectors d and b are trained; b starts at zero.

Shapes: r rank; widest in and out: the largest sizes among the adapted layers; `...` is any leading
shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from peftkit.methods.base import ADAPTER_DTYPES, AdapterModule, Method, Modules
from peftkit.methods.peft_format import LAYERS, TARGETS, PeftFormat
from peftkit.model.places import linear_shape
from peftkit.model.targets import RowSlice, Site

_B, _D = "vera_lambda_b", "vera_lambda_d"


class Projections(nn.Module):
    """The random matrices that all layers share, float32.

    Attributes:
        vera_A: (r, widest in). vera_B: (widest out, r).
    """

    vera_A: Tensor
    vera_B: Tensor

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.register_buffer("vera_A", a, persistent=False)
        self.register_buffer("vera_B", b, persistent=False)


class VeRALinear(AdapterModule):
    """A frozen linear layer plus a random update with trained scales.

    Attributes:
        vera_lambda_d: (r,). vera_lambda_b: (num_rows,), for the adapted output rows.
        projections: The shared matrices, set by `VeRA.share`.
    """

    projections: Projections

    def __init__(self, base: nn.Module, site: Site, method: VeRA) -> None:
        super().__init__(base, site)
        self.in_features, self.out_features = linear_shape(base)
        self.d_initial, dtype = method.d_initial, ADAPTER_DTYPES[method.dtype]
        self.dropout = nn.Dropout(method.dropout) if method.dropout else nn.Identity()
        self.slice = RowSlice(site, self.out_features, self.base_device)
        self.vera_lambda_d = self.new_parameter(method.rank, dtype=dtype)
        self.vera_lambda_b = self.new_parameter(self.slice.num_rows, dtype=dtype)

    def slices(self) -> tuple[Tensor, Tensor]:
        """Return this layer's A (r, in) and B (out, r)."""
        shared = self.projections
        return shared.vera_A[:, : self.in_features], shared.vera_B[: self.out_features]

    def full_b(self) -> Tensor:
        """Return b of every output row, zero if it is not adapted."""
        return self.slice.spread(self.vera_lambda_b)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        out: Tensor = self.base(x, *args, **kwargs)
        if not self.enabled:
            return out
        a, b = (matrix.to(out.dtype) for matrix in self.slices())
        hidden = functional.linear(self.dropout(x).to(out.dtype), a)  # (..., r)
        update = functional.linear(hidden * self.vera_lambda_d.to(out.dtype), b)  # (..., out)
        return out + update * self.full_b().to(out.dtype)

    def reset(self, generator: torch.Generator) -> None:
        nn.init.constant_(self.vera_lambda_d, self.d_initial)
        nn.init.zeros_(self.vera_lambda_b)

    def state(self) -> dict[str, Tensor]:
        return {_B: self.full_b().detach(), _D: self.vera_lambda_d.detach()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        self.vera_lambda_d.copy_(state[_D])
        self.vera_lambda_b.copy_(self.slice.take(state[_B]))

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        a, b = (part.to(weight.device, torch.float32) for part in self.slices())
        lambda_b, lambda_d = self.full_b().float(), self.vera_lambda_d.float()
        left = lambda_b.to(weight.device)[:, None] * b
        return torch.addmm(weight, left, lambda_d.to(weight.device)[:, None] * a)


class VeRA(Method):
    """Vector-based random matrix adaptation of linear layers."""

    wraps_linear_layers: ClassVar[bool] = True
    shared_names: ClassVar[tuple[str, ...]] = ("vera_A", "vera_B")

    type: Literal["vera"] = "vera"
    rank: int = Field(default=256, ge=1)
    """Rank r of the random matrices; larger than LoRA's, because it costs r values per layer."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the input of A."""
    d_initial: float = Field(default=0.1, gt=0)
    """Initial value of d."""
    projection_seed: int = Field(default=0, ge=0)
    """Seed of the random matrices."""
    save_projection: bool = True
    """Save the random matrices too: larger files that do not depend on torch's generator."""

    def wrap(self, base: nn.Module, site: Site) -> VeRALinear:
        return VeRALinear(base, site, self)

    def share(self, modules: Modules) -> None:
        layers = [module for module in modules.values() if isinstance(module, VeRALinear)]
        generator = torch.Generator().manual_seed(self.projection_seed)
        a = _kaiming((self.rank, max(layer.in_features for layer in layers)), generator)
        b = _kaiming((max(layer.out_features for layer in layers), self.rank), generator)
        device = layers[0].vera_lambda_d.device
        projections = Projections(a.to(device), b.to(device))
        for layer in layers:
            layer.projections = projections

    def shared(self, modules: Modules) -> dict[str, Tensor]:
        first = next(iter(modules.values()), None)
        if not self.save_projection or not isinstance(first, VeRALinear):
            return {}
        return {"vera_A": first.projections.vera_A, "vera_B": first.projections.vera_B}


def _kaiming(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw like torch's kaiming_uniform_ on the CPU, for the same values on every device."""
    bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class VeRAFormat(PeftFormat[VeRA]):
    """VeRA in PEFT's files."""

    peft_type = "VERA"
    method_class = VeRA
    settings: ClassVar[Mapping[str, str]] = {
        "rank": "r",
        "dropout": "vera_dropout",
        "d_initial": "d_initial",
        "projection_seed": "projection_prng_key",
        "save_projection": "save_projection",
    }
    known_fields = (
        *TARGETS, *LAYERS, "fan_in_fan_out", "init_weights",
    )  # fmt: skip
