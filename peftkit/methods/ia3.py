"""(IA)^3: y = l * (W x + b), and W (l * x) + b in feed-forward layers  (Liu et al., 2022,
arXiv:2205.05638).

The paper scales keys, values and the inner activations of the feed-forward layers. The latter are
the input of the down projection, so its input is scaled instead of its output. l starts at one.

Shapes: `...` is any leading shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from peftkit.errors import AdapterError, TargetError
from peftkit.files.safe_regex import fullmatches
from peftkit.files.strict_json import Json, JsonMap, shown
from peftkit.methods.base import ADAPTER_DTYPES, AdapterModule, Method, Modules
from peftkit.methods.peft_format import LAYERS, TARGETS, PeftFormat
from peftkit.model.places import linear_shape
from peftkit.model.targets import RowSlice, Site

_FEEDFORWARD = "feedforward_modules"
_L = "ia3_l"


class IA3Linear(AdapterModule):
    """A frozen linear layer whose output, or input, is scaled feature by feature.

    Attributes:
        ia3_l: (num_scaled,) factors of the input's features, or of the adapted output rows.
        scales_input: Whether l is applied before the weight.
    """

    def __init__(self, base: nn.Module, site: Site, dtype: torch.dtype, *, feedforward: bool):
        super().__init__(base, site)
        self.in_features, self.out_features = linear_shape(base)
        self.scales_input = feedforward
        num_features = self.in_features if feedforward else self.out_features
        self.slice = RowSlice(site, num_features, self.base_device)
        self.ia3_l = self.new_parameter(self.slice.num_rows, dtype=dtype)

    def full_l(self) -> Tensor:
        """Return l of every feature, one if it is not adapted."""
        return self.slice.spread(self.ia3_l, fill=1.0)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if self.enabled and self.scales_input:
            x = (x * self.full_l()).to(x.dtype)
        out: Tensor = self.base(x, *args, **kwargs)
        if not self.enabled or self.scales_input:
            return out
        return (out * self.full_l()).to(out.dtype)

    def reset(self, generator: torch.Generator) -> None:
        nn.init.ones_(self.ia3_l)

    def state(self) -> dict[str, Tensor]:
        return {_L: self.full_l().detach().view(self.state_shapes()[_L])}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {_L: (1, self.in_features) if self.scales_input else (self.out_features, 1)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        self.ia3_l.copy_(self.slice.take(state[_L].flatten(), fill=1.0))

    @property
    def changed(self) -> tuple[str, ...]:
        return ("weight",) if self.scales_input or self.bias is None else ("weight", "bias")

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        factor = self.full_l().detach().to(weight.device, torch.float32)
        return weight * (factor if self.scales_input or weight.ndim == 1 else factor[:, None])


class IA3(Method):
    """Learned scaling of keys, values and feed-forward activations."""

    wraps_linear_layers: ClassVar[bool] = True

    type: Literal["ia3"] = "ia3"
    targets: tuple[str, ...] | str = ("k", "v", "down")
    """Roles (q, k, v, o, gate, up, down, ...), groups (attention, ffn, all-linear), or names."""
    feedforward: tuple[str, ...] | str = Field(default=("down", "cross_down", "expert_down"))
    """Roles or name endings of layers whose input is scaled instead of the output; or a regex."""

    def wrap(self, base: nn.Module, site: Site) -> IA3Linear:
        feedforward = self._is_feedforward(site)
        if feedforward and site.rows:
            raise TargetError(
                f"ia3 cannot scale the input of a part of the fused layer {site.path}",
                found=f"roles {', '.join(site.roles)} of it",
                fix="Remove them from `feedforward`, or target the whole layer by its name.",
            )
        return IA3Linear(base, site, ADAPTER_DTYPES[self.dtype], feedforward=feedforward)

    def _is_feedforward(self, site: Site) -> bool:
        if isinstance(self.feedforward, str):
            return bool(fullmatches(self.feedforward, [site.path]))
        if site.roles and all(role in self.feedforward for role in site.roles):
            return True
        # PEFT's rule, which ignores dots
        return any(site.path.endswith(ending) for ending in self.feedforward)


class IA3Format(PeftFormat[IA3]):
    """(IA)^3 in PEFT's files."""

    peft_type = "IA3"
    known_fields = (
        *TARGETS, _FEEDFORWARD, "fan_in_fan_out", "init_ia3_weights",
    )  # fmt: skip
    absent_fields = ("bias", *LAYERS)
    subset_fields = (_FEEDFORWARD,)

    def method(self, fields: JsonMap) -> IA3:
        targets = fields.get(_FEEDFORWARD)
        if targets is not None and not isinstance(targets, str | list):
            raise AdapterError("the adapter's config is not valid", found=shown(targets))
        return IA3(feedforward=targets if isinstance(targets, str) else tuple(targets or ()))

    def fields(self, method: IA3, model: nn.Module, modules: Modules) -> Json:
        return {"init_ia3_weights": True}

    def subset_of(self, module: AdapterModule) -> str:
        return _FEEDFORWARD if isinstance(module, IA3Linear) and module.scales_input else ""
